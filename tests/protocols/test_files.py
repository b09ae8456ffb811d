"""Files of protocols and releases: values, errors and plug-ins."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import fczoo
from fczoo.backbones.names import BUNDLED_NAME
from fczoo.backbones.pretraining_overlap import pretraining_sets
from fczoo.core.errors import FczooError
from fczoo.protocols import registry
from fczoo.protocols.reader import read_source
from fczoo.protocols.registry import PROTOCOLS, RELEASES, SourceRegistry
from fczoo.protocols.stated_values import EvenShare, Source, ValuesByBeta, ValuesByTasks

MINIMAL = """
about = "A toy."
paper = "none"
proposes = ["fedavg"]
datasets = ["digits", "cifar100"]
seeds = { value = [1, 2], source = "paper" }
partitions = { cifar100 = ["dirichlet:1,cap=on", "dirichlet:0.5"] }
"""


def read(folder: Path, text: str) -> Source:
    path = folder / "toy.toml"
    path.write_text(MINIMAL + text)
    return read_source(path, "protocol", "toy", PROTOCOLS.get)


def test_source_reads_values(tmp_path: Path) -> None:
    source = read(
        tmp_path,
        """
[[settings]]
source = "a"
values = { tasks = 10, mean = { none = true }, std = [0.5, 0.5] }
printed = { tasks = 5 }
[[settings]]
source = "b"
open = true
datasets = ["digits"]
values = { rounds = { total = 30, least = 1 }, epochs = { tasks = [5, 10], values = [20, 10] } }
[[options]]
source = "c"
methods = ["fedavg", "ewc"]
values = { lr = 0.1, head_lr = { same_as = "lr" } }
[[tables]]
source = "d"
datasets = ["digits", "cifar100"]
rows = [{ methods = ["fedavg"], options = ["lr", "lr_backbone"], values = [1e-2, [1e-3, 1e-4]] }]
""",
    )
    digits = source.settings_on("digits")
    assert (digits["mean"].value, digits["std"].value) == (None, (0.5, 0.5))
    assert (digits["tasks"].printed, digits["std"].printed, digits["mean"].open) == (5, ..., False)
    assert digits["rounds"].value == EvenShare(30, 1) and digits["rounds"].open
    assert [digits["rounds"].value_for(n) for n in (4, 10, 50)] == [7, 3, 1]
    assert digits["epochs"].value == ValuesByTasks({5: 20, 10: 10})
    assert [digits["epochs"].value_for(n) for n in (2, 5, 6, 20)] == [20, 20, 10, 10]
    assert "rounds" not in source.settings_on("cifar100")
    assert source.options("ewc", "cifar100", None) == {"lr": 0.1, "head_lr": 0.1}
    assert source.hyperparameters("fedavg", "cifar100")["lr"].value == ValuesByBeta(
        {1.0: 1e-3, 0.5: 1e-4}
    )
    assert source.options("fedavg", "cifar100", 0.5)["lr_backbone"] == 1e-4
    assert source.options("fedavg", "digits", None)["lr"] == 1e-2
    assert source.seeds.value == (1, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[settings]\n", "Expected"),
        ("[[settings]]\nvalues = {}\n", "settings[0]: Object missing required field `source`"),
        (
            "[[settings]]\nsource = 1\nvalues = {}\n",
            "settings[0].source: Expected `str`, got `int`",
        ),
        ("note = []\n", "Object contains unknown field `note`"),
        (
            "[[settings]]\nsource = ''\ndatasets = ['dogits']\nvalues = {}\n",
            "settings[0].datasets: 'dogits' is not in the file's list of data sets",
        ),
        (
            "[[settings]]\nsource = ''\nvalues = { rounds = { totl = 3 } }\n",
            "settings[0].values.rounds: a table must be { none = true }",
        ),
        (
            "[[settings]]\nsource = ''\nvalues = { rounds = {} }\n",
            "settings[0].values.rounds: a table must be { none = true }",
        ),
        (
            "[[settings]]\nsource = ''\nvalues = {}\nprinted = { rounds = 3 }\n",
            "settings[0].printed: rounds has no value",
        ),
        (
            "[[options]]\nsource = ''\nvalues = {}\n",
            "options[0]: give methods, or every_method = true",
        ),
        (
            "[[settings]]\nsource = ''\nmethods = ['ewc']\nvalues = {}\n",
            "settings[0]: settings cannot depend on methods",
        ),
        (
            "[[options]]\nsource = ''\nshares_classes_with = 'a'\nmethods = ['ewc']\nvalues = {}\n",
            "options[0]: shares_classes_with is for settings only",
        ),
        (
            "[[tables]]\nsource = ''\ndatasets = ['digits']\n"
            "rows = [{ methods = ['ewc'], options = ['lr'], values = [1, 2] }]\n",
            "tables[0].rows[0].values: 2 values for 1 data sets",
        ),
        (
            "[[tables]]\nsource = ''\ndatasets = ['cifar100']\n"
            "rows = [{ methods = ['ewc'], options = ['lr'], values = [[1, 2, 3]] }]\n",
            "tables[0].rows[0].values: 3 values for the 2 partitions of cifar100",
        ),
        (
            "[[options]]\nsource = ''\nmethods = ['ewc']\nvalues = { lr = { total = 3 } }\n",
            "options[0].values.lr: a table must be { none = true } or { same_as = OPTION } or "
            "{ setting = NAME }",
        ),
        (
            "[[settings]]\nsource = ''\nvalues = { rounds = { setting = 'epochs' } }\n",
            "settings[0].values.rounds: a table must be { none = true } or { total = N, least = N }",
        ),
        (
            "[[tables]]\nsource = ''\ndatasets = ['digits']\n"
            "rows = [{ methods = ['ewc'], options = ['lr'], values = [{ none = true }] }]\n",
            "tables[0].rows[0].values: give values, or lists with one value per partition",
        ),
        (
            "[search]\nsource = ''\nsettings = { rounds = 2 }\nmethods = {}\n",
            "search.settings: give the dataset of the search",
        ),
        ("protocol = 'quick'\n", "protocol: only a release names the protocol of its paper"),
        ("[[copies]]\nsection = 'settings'\n", "copies[0]: the file names no protocol"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(FczooError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'toy.toml'} is not a valid protocol: ")
    assert problem in message and "\n" not in message


def test_quick_protocol_lists_pretraining_of_bundled_backbone() -> None:
    quick = PROTOCOLS.get("quick")
    assert quick.settings["backbone"].value == BUNDLED_NAME
    assert tuple(quick.overlap_settings) == pretraining_sets(BUNDLED_NAME)


def test_plugin_provides_protocol_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "fczoo_toys" / "protocols"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "toy.toml").write_text(MINIMAL)
    (folder / "broken.toml").write_text("about = 1\n")
    (tmp_path / "fczoo_single.py").write_text("")
    entries = [
        EntryPoint(name, module, "fczoo.plugins")
        for name, module in (("toys", "fczoo_toys.parts"), ("single", "fczoo_single"))
    ]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "plugin_entries", lambda: entries)
    protocols = SourceRegistry("protocol")
    assert set(protocols.names()) == {*PROTOCOLS.names("fczoo."), "toy"}
    assert "toy" not in protocols.names("fczoo.")
    assert (protocols.get("TOY").paper, protocols.about("toy")) == ("none", "A toy.")
    assert "broken.toml is not a valid protocol: about: Expected `str`, got `int`" in caplog.text


def test_wrong_names_are_reported_with_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = frozenset({"rounds", "epochs"})
    text = '[[options]]\nsource = "a"\nmethods = ["{}"]\nvalues = {{ {} = 1 }}\n'
    with pytest.raises(
        FczooError, match=r"toy\.toml: fedavg\.rat is not an option; did you mean rank"
    ):
        read(tmp_path, text.format("fedavg", "rat")).check_names(settings)
    wrong = '[[settings]]\nsource = "a"\nvalues = { round = 3 }\n'
    with pytest.raises(
        FczooError, match=r"toy\.toml: round is not an option; did you mean rounds\?"
    ):
        read(tmp_path, wrong).check_names(settings)
    read(tmp_path, text.format("fedavgg", "lr")).check_names(settings)
    advice = "options of fedavgg, which is not installed; did you mean fedavg"
    assert f"{tmp_path}/toy.toml has {advice}" in caplog.text


@pytest.mark.parametrize("kind", [PROTOCOLS, RELEASES])
def test_names_in_bundled_files_exist(kind: SourceRegistry) -> None:
    for name in kind.names("fczoo."):
        kind.get(name).check_names(frozenset(fczoo.Settings.__dataclass_fields__))


def test_duplicate_protocol_name_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fczoo_twice" / "protocols"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "hgp.toml").write_text(MINIMAL)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("twice", "fczoo_twice", "fczoo.plugins")
    monkeypatch.setattr(registry, "plugin_entries", lambda: [entry])
    with pytest.raises(FczooError, match=r"'hgp' is defined twice, in fczoo\.assets"):
        SourceRegistry("protocol").names()


def test_protocol_class_is_rejected_with_file_path() -> None:
    with pytest.raises(FczooError, match=r"write protocols/mine\.toml in the plug-in's package"):
        fczoo.register_protocol("mine")
    with pytest.raises(FczooError, match=r"no protocol is called 'hpg'; did you mean hgp"):
        PROTOCOLS.get("hpg")
    assert RELEASES.get("Fed_Mammoth") is RELEASES.get("fed-mammoth")
