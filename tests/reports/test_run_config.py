"""The origin of every value of a run, before it starts and as its folder records it."""

from dataclasses import fields, replace
from typing import Any

from fczoo import Settings, create_method
from fczoo.core.files import through_json
from fczoo.reports.run_config import BY_USER, RunConfig, configure_run

SEARCH = {"methods": ["hgp"], "trials": 4}


def configure(**options: Any) -> RunConfig:
    return configure_run("hgp", Settings.for_dataset("digits"), options)


def test_the_last_place_that_states_an_option_is_its_origin() -> None:
    origins = configure(lr=0.5).option_origins
    assert origins["lr"] == "--set" and origins["server_lr"] == "data set"
    assert origins["prefix_len"] == "default"
    settings = Settings.for_dataset("cifar100", protocol="hgp")
    assert configure_run("hgp", settings, {}).option_origins["lr"] == "protocol hgp"
    settings = replace(settings, as_released="fed-mammoth")
    assert configure_run("hgp", settings, {}).option_origins["lr"] == "as released: fed-mammoth"


def test_a_value_that_would_be_the_same_without_the_user_is_not_the_users() -> None:
    config = configure()
    repeated = configure(**config.options)
    assert repeated.option_origins == config.option_origins
    assert not repeated.changed_options(*BY_USER)


def test_a_default_in_place_of_the_data_sets_value_is_the_users() -> None:
    default = create_method("hgp").server_lr  # type: ignore[attr-defined]
    assert configure(server_lr=default).changed_options("--set") == {"server_lr": default}


def test_searched_options_of_a_tuned_method_come_from_the_search() -> None:
    tuned = replace(configure(lr=0.5, rebalance="all"), search=SEARCH)
    assert tuned.option_origins["lr"] == "--tuned"
    assert configure(lr=0.5).option_origins["lr"] == "--set"


def test_a_record_has_the_origins_of_the_run() -> None:
    config = configure(lr=0.5)
    record = replace(config, options=through_json(dict(config.options)))
    assert record.option_origins == config.option_origins
    assert record.changed_options("--set") == {"lr": 0.5}


def test_an_absent_method_has_no_origins() -> None:
    record = replace(configure(), method="absent", options={"lr": 1})
    assert record.option_origins == {} and record.changed_options("--set") == {}


def test_settings_come_from_defaults_data_set_protocol_or_user() -> None:
    settings = Settings.for_dataset("cifar100", protocol="hgp", epochs=7, precision="bf16")
    origins = configure_run("hgp", settings, {}).setting_origins
    assert origins["rounds"] == "protocol hgp"
    assert origins["epochs"] == origins["precision"] == origins["protocol"] == "given"
    assert origins["deterministic"] == "default"
    origins = configure().setting_origins
    assert origins["rounds"] == "data set"
    assert list(origins) == [field.name for field in fields(Settings)]
