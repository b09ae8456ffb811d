"""Origin of every option and setting of a run, before it starts and from its record."""

from dataclasses import fields, replace
from typing import Any

from fczoo import Settings, create_method
from fczoo.core.files import through_json
from fczoo.reports.run_config import USER_ORIGINS, RunConfig, configure_run

SEARCH = {"methods": ["hgp"], "trials": 4}


def configure(**options: Any) -> RunConfig:
    return configure_run("hgp", Settings.for_dataset("digits"), options)


def test_option_origin_is_last_layer_that_sets_it() -> None:
    origins = configure(lr=0.5).option_origins
    assert origins["lr"] == "--set" and origins["server_lr"] == "data set"
    assert origins["prefix_len"] == "default"
    settings = Settings.for_dataset("cifar100", protocol="hgp")
    assert configure_run("hgp", settings, {}).option_origins["lr"] == "protocol hgp"
    settings = replace(settings, as_released="fed-mammoth")
    assert configure_run("hgp", settings, {}).option_origins["lr"] == "as released: fed-mammoth"


def test_unchanged_value_is_not_attributed_to_user() -> None:
    config = configure()
    repeated = configure(**config.options)
    assert repeated.option_origins == config.option_origins
    assert not repeated.changed_options(*USER_ORIGINS)


def test_default_over_dataset_value_is_attributed_to_user() -> None:
    default = create_method("hgp").server_lr  # type: ignore[attr-defined]
    assert configure(server_lr=default).changed_options("--set") == {"server_lr": default}


def test_tuned_options_have_search_origin() -> None:
    tuned = replace(configure(lr=0.5, rebalance="all"), search=SEARCH)
    assert tuned.option_origins["lr"] == "--tuned"
    assert configure(lr=0.5).option_origins["lr"] == "--set"


def test_stored_record_keeps_option_origins() -> None:
    config = configure(lr=0.5)
    record = replace(config, options=through_json(dict(config.options)))
    assert record.option_origins == config.option_origins
    assert record.changed_options("--set") == {"lr": 0.5}


def test_missing_method_has_no_option_origins() -> None:
    record = replace(configure(), method="absent", options={"lr": 1})
    assert record.option_origins == {} and record.changed_options("--set") == {}


def test_setting_origins_name_layers() -> None:
    settings = Settings.for_dataset("cifar100", protocol="hgp", epochs=7, precision="bf16")
    origins = configure_run("hgp", settings, {}).setting_origins
    assert origins["rounds"] == "protocol hgp"
    assert origins["epochs"] == origins["precision"] == origins["protocol"] == "given"
    assert origins["deterministic"] == "default"
    origins = configure().setting_origins
    assert origins["rounds"] == "data set"
    assert list(origins) == [field.name for field in fields(Settings)]
