"""Printed costs: counts computed by hand, and their agreement with the printed values."""

from fczoo.papers.costs import CostComparison
from fczoo.papers.printed_numbers import get_paper
from helpers_papers import output_of


def test_fppl_costs_match_printed_table():
    """Count prompts 5 x 20 x 768, keys 20 x 768, head 200 x 769, ten means and a scale."""
    text = output_of("reproduce", "fppl/T2", "--row", "FPPL")
    rows = {line.split()[3]: line.split()[4:] for line in text.splitlines()[2:]}
    sent = 76_800 + 15_360 + 7_680 + 1
    assert rows["COMM"] == ["0.25e6", f"{sent + 153_800:,}", f"{sent:,}", "yes"]
    assert rows["ESTG"] == ["1.54e6", f"{20 * 76_800:,}", f"{20 * 76_800:,}", "yes"]
    assert rows["PARAM"] == ["0.09e6", "92,161", "92,161", "yes"]
    assert "GLFC" not in text


def test_cost_table_rejects_run_options():
    assert "so --seeds has no effect" in output_of(
        "reproduce", "fppl/T2", "--row", "FPPL", "--seeds", "0", code=1
    )


def test_count_agrees_if_it_rounds_to_printed_value():
    (number,) = (
        n for n in get_paper("fppl").numbers if (n.method, n.value) == ("FedSLCA", 91_860_000)
    )
    assert CostComparison(number, 91_864_999, 0, 0).agreement == "yes"
    assert CostComparison(number, 91_865_001, 0, 0).agreement == "no"
    # weights of ViT-B and head, and 10 classes with mean and covariance
    per_task = 10 * (768 + 768 * 768)
    assert (
        CostComparison(number, 85_952_456, 0, per_task).agreement
        == "yes, if uploads sent once per task are counted, too"
    )
