"""Tables of papers, and comparison of runs with them."""

import pytest

from fczoo import create_method
from fczoo.core.metrics import METRICS
from fczoo.core.registry import DATASETS, METHODS
from fczoo.papers.printed_numbers import get_paper, papers, papers_without_table
from fczoo.papers.variants import readings
from helpers_papers import B16, output_of, write_archive
from helpers_results import QUICK, RESULTS

TUNED_RUN = (QUICK, "cifar100-112px-tuned/pilora/seed0")


def test_printed_numbers_are_unique_and_complete():
    numbers = [n for p in papers().values() for n in p.numbers]
    assert len(numbers) == 1250
    assert (
        len(
            {
                (n.paper, n.table, n.dataset, n.tasks, n.partition, n.method, n.metric)
                for n in numbers
            }
        )
        == 1250
    )
    assert {p.key: len(p.numbers) for p in papers().values()} == {
        "pilora": 246,
        "hgp": 277,
        "fcilpt": 619,
        "fppl": 108,
    }


@pytest.mark.parametrize(
    ("key", "table", "dataset", "spec", "method", "metric", "value", "std"),
    [
        ("hgp", "T1", "CIFAR-100", "dirichlet:0.05", "HGP", "FAA", 90.16, 0.24),
        ("hgp", "T2", "CUB-200", "dirichlet:0.2", "HGP", "FAA", 78.58, 0.60),
        ("pilora", "T1", "CIFAR-100", "quantity:6", "PILoRA", "A_N", 69.5, None),
        (
            "fcilpt",
            "T7",
            "CIFAR-100",
            "overlap:0.6",
            "ablation: sorted+relevant+irrelevant (full)",
            "acc@100classes",
            85.9,
            None,
        ),
        ("fppl", "T1", "ImageNet-R", "dirichlet:0.5", "FPPL", "Abar", 74.33, 0.37),
    ],
)
def test_printed_number_has_its_table_position(
    key, table, dataset, spec, method, metric, value, std
):
    position = (table, dataset, spec, method, metric)
    (number,) = [
        n
        for n in get_paper(key).numbers
        if (n.table, n.dataset, n.spec, n.method, n.our_metric) == position
    ]
    assert (number.value, number.std) == (value, std)


def test_paper_tables_name_existing_parts():
    """Check that tables name known metrics and conditions, and valid options of methods."""
    methods, datasets = METHODS.names(), DATASETS.names()
    for paper in papers().values():
        assert set(paper.caveats) - {""} <= {n.table for n in paper.numbers}
        metrics = {n.our_metric for n in paper.numbers if n.classes is None}
        assert metrics - {None} <= set(METRICS)
        assert set(paper.methods) == {n.method for n in paper.numbers}
        words = {n.partition for n in paper.numbers} | {n.dataset for n in paper.numbers}
        assert set(paper.conditions) <= words
        for number in paper.numbers:
            row = paper.row(number)
            if row.method in methods and row.dataset in datasets:
                create_method(row.method, row.dataset, **row.options)


def test_missing_option_lists_only_missing_systems():
    page = output_of("papers", "--missing")
    absent, beyond = page.split("Rows that fczoo cannot run:")
    methods = METHODS.names()
    for paper in papers().values():
        for number in paper.numbers:
            row = paper.row(number)
            is_method = row.method in methods
            assert row.why or is_method or f"{number.method} " in absent, number
    names = {line.split()[-1] for line in absent.splitlines() if line}
    assert not names & set(METHODS.names())
    assert "ResNet-18" in beyond
    assert "COMM" in beyond
    left_out = page.split("Papers whose tables fczoo does not have:")[1]
    assert {"lander", "mfcl", "affcl", "fedcbdr", "uopp", "powder"} <= papers_without_table().keys()
    for name, paper in papers_without_table().items():
        assert name in methods
        assert f" {name} " in f" {' '.join(left_out.split())} "
        assert paper.citation.split(",")[0] in left_out
    assert "leave hgp out" in output_of("papers", "hgp", "--missing", code=1)


def test_papers_command_prints_lists_and_tables():
    assert "1903" not in output_of("papers")
    assert "AppE" in output_of("papers")
    assert "T7" in output_of("papers")
    page = output_of("papers", "HGP", "t1")
    assert "90.39 ± 0.08" in page
    assert "ImageNet-A, 10 tasks" in page
    assert "EuroSAT, 5 tasks" not in page
    assert "16-bit precision" in page
    assert "656.5" in output_of("papers", "pilora", "T1")
    assert "656.5" not in output_of("papers", "pilora", "T3")
    assert "did you mean hgp" in output_of("papers", "hpg", code=1)
    assert "it has T1, T2" in output_of("papers", "hgp", "T9", code=1)


def test_compare_lists_setting_differences_of_suite_run(tmp_path):
    page = output_of(
        "compare",
        str(write_archive(tmp_path, RESULTS / "cifar100.csv", "hgp/seed0", "fedncm/seed0")),
        "--paper",
        "hgp",
    )
    row = next(line for line in page.splitlines() if line.startswith("hgp "))
    assert "36.4  90.4 ± 0.1         -54.0" in row
    assert "no: 20 settings differ" in row
    for excerpt in (
        "rounds 2 (paper: 5)",
        f"(paper: {B16})",
        "image_size 64 (paper: none)",
        "train_per_class 50 (paper: all)",
        "resize crop (paper: squash)",
        "hgp.logit_norm 0.1 (paper: none)",
        "seeds 1 (paper: 3)",
    ):
        assert excerpt in page
    assert "Not in HGP's tables of this data set: fedncm." in page and "16-bit precision" in page


def test_compare_rejects_paper_without_matching_numbers(make_run, tmp_path):
    folder = make_run(tmp_path / "run", {"hgp": {0: 70.0}})
    assert "has no number for the methods and data sets of these runs" in output_of(
        "compare", str(folder), "--paper", "hgp", code=1
    )


def test_fcilpt_average_is_mean_over_tasks():
    """Read FCILPT's A_t as a mean over tasks and PILoRA's Avg as the share of all images."""
    for name, metric in (("fcilpt", "Abar"), ("pilora", "Avg")):
        number = next(n for n in get_paper(name).numbers if n.metric == "Avg")
        assert number.our_metric == metric


def test_printed_rows_use_head_init_of_released_code() -> None:
    """Initialise the head of every printed row as the released code does.

    A head that starts at zero may reach a much higher accuracy than the paper's. HGP's code
    (fed-mammoth) initialises three heads as PyTorch does and the others as timm does; its PIP is
    not public.
    """
    as_pytorch, rows = {"hgp", "l2p", "codap", "pip"}, set()
    for paper in papers().values():
        for row in map(paper.row, paper.numbers):
            if (
                row.method in METHODS.names()
                and "head_init" in METHODS.options(row.method)
                and not row.why
            ):
                protocol_value = paper.protocol.methods.get(row.method, {}).get("head_init")
                start = row.options.get("head_init", protocol_value and protocol_value.value)
                as_timm = paper.key == "hgp" and row.method not in as_pytorch
                expected = "normal" if as_timm else "default"
                assert start == ("means" if row.card == "fedncm" else expected), (
                    paper.key,
                    row.method,
                )
                rows.add((paper.key, row.method))
    assert len(rows) > 30


def test_compare_marks_resnet_rows_not_implemented(tmp_path):
    archive = str(write_archive(tmp_path, QUICK, "cifar100-112px-tuned/bic/seed0"))
    page = output_of("compare", archive, "--paper", "fcilpt", "--table", "t1")
    (row, *others) = [line for line in page.splitlines() if "BiC+FL[ResNet-18], T1" in line]
    assert row.startswith("–") and row.endswith("–  not implemented")
    assert len(others) == 10 and all(line.endswith("not implemented") for line in others)
    assert page.count("Not implemented: BiC+FL[ResNet-18] (T1): it is for a ResNet-18") == 1


def test_pilora_without_lora_is_separate_row(tmp_path):
    page = output_of("compare", str(write_archive(tmp_path, *TUNED_RUN)), "--paper", "pilora")
    rows = [line for line in page.splitlines() if "w/o LoRA (fine-tune backbone), T3" in line]
    assert len(rows) == 3 and all("settings differ" in line for line in rows)
    assert "pilora.tune lora (paper: full)" in page


def test_compare_lists_common_differences_once(tmp_path):
    page = output_of("compare", str(write_archive(tmp_path, *TUNED_RUN)), "--paper", "pilora")
    (common_line,) = [line for line in page.splitlines() if line.startswith("All rows differ")]
    assert "rounds 2 (paper: 30)" in common_line
    assert "pilora.distance rms (paper: squared)" in common_line
    assert "values that the paper does not state: " in common_line
    assert "precision bf16" in common_line
    assert page.count("rounds 2 (paper: 30)") == 1 and page.count("precision bf16") == 1
    assert "- against w/o l_ort (T3, beta=0.5): pilora.head_tune true (paper: false)" in page


@pytest.mark.parametrize("row", ["w/o l_ort", "W/O L_ORT", "l_ORT"])
def test_table_and_row_options_ignore_case(tmp_path, row):
    archive = str(write_archive(tmp_path, *TUNED_RUN))
    page = output_of("compare", archive, "--paper", "pilora", "--table", "t3", "--row", row)
    rows = [line for line in page.splitlines() if ", 10 tasks, " in line]
    assert rows and all("w/o l_ort, T3 CIFAR-100" in line for line in rows)
    exact_name = output_of(
        "compare", archive, "--paper", "pilora", "--row", "pilora", "--table", "T1"
    )
    assert (
        "PILoRA, T1" in exact_name and "HeadTune" not in exact_name
    )  # an exact name precedes a partial match


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--table", "T9"], "Error: no table is called 'T9'; known: T1, T2, T3\n"),
        (["--table", "T3", "--row", "nothing"], "no row is called 'nothing'; known: w/o prototype"),
        (
            ["--row", "EWC+FL"],
            "have no number for the methods and data sets of these runs; they cover ewc",
        ),
    ],
)
def test_invalid_table_or_row_is_rejected(tmp_path, words, says):
    text = output_of(
        "compare", str(write_archive(tmp_path, *TUNED_RUN)), "--paper", "pilora", *words, code=1
    )
    assert says in text and text.count("\n") == 1


def test_every_printed_row_has_reading_or_is_not_implemented():
    """Allow rows without a reading only for FCILPT's ResNet-18."""
    absent = set()
    for paper in papers().values():
        for number in paper.numbers:
            if paper.row(number).why:
                absent.add((paper.key, number.method))
            elif number.our_metric:
                assert readings(paper, number)
    resnets = {("fcilpt", n.method) for n in get_paper("fcilpt").numbers if "ResNet-18" in n.method}
    assert len(resnets) == 10
    assert absent == resnets
