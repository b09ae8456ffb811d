"""Configuration of a run: method, options, settings and seed, and the origin of each value."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.method import Method
from fczoo.core.options import spaces
from fczoo.core.registry import DATASETS, METHODS, create_method
from fczoo.federation.settings import Settings
from fczoo.federation.warm_start import start_options
from fczoo.protocols.registry import PROTOCOLS
from fczoo.protocols.stated_values import Source, Statement
from fczoo.reports.run_folder import RunRecord, recorded_settings
from fczoo.reports.runs import Line

# Origins of values, in addition to the names of protocols and releases in ``Settings.sources``
DEFAULT = "default"
DATASET = "data set"
GIVEN = "given"  # setting from the user
SET = "--set"  # option from the user
TUNED = "--tuned"  # option from ``fczoo tune``
USER_ORIGINS = (SET, TUNED)


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one run, before it starts or as its folder records it."""

    method: str
    options: Mapping[str, Any] = field(hash=False)  # all options of the method
    settings: Settings
    seed: int = 0
    # search of ``fczoo tune`` that found options of the method, as in ``bench.json``; or empty
    search: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def create_method(self) -> Method:
        """Create the method.

        Raises:
            FczooError: An option is invalid.
        """
        return create_method(self.method, **self.options)

    @cached_property
    def option_origins(self) -> dict[str, str]:
        """Return the origin of every option of the method; empty if it is not installed.

        A later origin overrides an earlier one: the method's default, its value for the data set,
        the protocol, released code, and the user or a tuned file. If the user's value repeats that
        of another origin, this origin counts.
        """
        if self.method not in METHODS.names():
            return {}
        values, origins = dict[str, Any](), dict[str, str]()
        for origin, layer in self._option_layers().items():
            values |= through_json(layer)
            origins |= dict.fromkeys(layer, origin)
        searched = spaces(METHODS.get(self.method)) if self.search else {}
        for name, value in through_json(dict(self.options)).items():
            if name in origins and value != values[name]:
                origins[name] = TUNED if name in searched else SET
        return origins

    @cached_property
    def source_names(self) -> list[str]:
        """Return protocol and released code; empty if one of them is not installed."""
        try:
            return list(self.settings.sources)
        except FczooError:
            return []

    def _option_layers(self) -> dict[str, dict[str, Any]]:
        """Return values of the method's options by origin; later origins take precedence."""
        cls, settings = METHODS.get(self.method), self.settings
        layers = {
            DEFAULT: {f.name: f.default for f in fields(cls)},
            DATASET: dict(cls.dataset_options.get(settings.dataset, {})),
        }
        try:
            beta = getattr(settings.partitioner, "beta", None)
        except FczooError:  # the run used a plug-in that is not installed here
            return layers
        for name in self.source_names:
            source = settings.sources[name]
            values = vars(settings)
            layers[name] = source.options(self.method, settings.dataset, beta, values)
        return layers

    def changed_options(self, *origins: str) -> dict[str, Any]:
        """Return options of some origins that differ from the method's defaults.

        Options from the user are included in any case.

        Args:
            *origins: Origins of options.
        """
        if not self.option_origins:
            return {}
        defaults = through_json({f.name: f.default for f in fields(METHODS.get(self.method))})
        return {
            name: value
            for name, value in self.options.items()
            if (origin := self.option_origins.get(name)) in origins
            and (origin in USER_ORIGINS or value != defaults[name])
        }

    @cached_property
    def setting_origins(self) -> dict[str, str]:
        """Return the origin of every setting.

        The expected value is that of protocol or released code; if they state none, that of the
        data set's schedule, else the default. A setting with another value is the user's.

        Raises:
            FczooError: Data set, protocol or release are not installed.
        """
        settings, origins = self.settings, dict[str, str]()
        statements = {
            name: (statement.value_for(settings.task_count), source_name)
            for source_name, source in settings.sources.items()
            for name, statement in source.settings_on(settings.dataset).items()
        }
        schedule = asdict(DATASETS.get(settings.dataset).defaults)
        for setting in fields(Settings):
            expected = setting.default, DEFAULT
            if setting.name in schedule:
                expected = schedule[setting.name], DATASET
            expected_value, origin = statements.get(setting.name, expected)
            is_expected = getattr(settings, setting.name) == expected_value
            origins[setting.name] = origin if is_expected else GIVEN
        return origins


def configure_run(
    method: str,
    settings: Settings,
    options: Mapping[str, Any],
    seed: int = 0,
    search: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Create the configuration of a run.

    Args:
        method: Name of the method.
        settings: Settings of the run.
        options: Options from the user or a tuned file. They take precedence over the options of a
            stored model from which the run starts, then those of released code and protocol, then
            the method's values for the data set.
        seed: Seed of the run.
        search: Search of ``fczoo tune`` that found options.

    Raises:
        FczooError: A name is unknown, or a value is invalid.
    """
    start = settings.start_from
    kept_options = start_options(start, METHODS.get(method).name) if start else {}
    values = {**settings.method_options(method), **kept_options, **options}
    instance = create_method(method, settings.dataset, **values)
    return RunConfig(instance.name, asdict(instance), settings, seed, search or {})


def recorded_config(record: RunRecord) -> RunConfig:
    """Return the recorded configuration of a finished run.

    Args:
        record: The run.
    """
    assert record.result is not None
    settings = recorded_settings(record.bench_file.settings)
    return RunConfig(record.method, record.result.options, settings, record.seed, record.search)


def protocol_of_value(
    method: str, option: str, value: Any, dataset: str
) -> tuple[Source, Statement] | None:
    """Find the protocol that states a method's value for a data set, and its statement.

    Protocols of the method's own paper precede protocols that compare with the method.

    Args:
        method: Name of the method.
        option: Name of the option.
        value: Value of the option.
        dataset: Name of the data set.

    Returns:
        Protocol and statement; None if no protocol states the value.
    """
    protocols = map(PROTOCOLS.get, PROTOCOLS.names())
    for protocol in sorted(protocols, key=lambda p: method not in p.proposes):
        if dataset in protocol.dataset_options:
            statement = protocol.hyperparameters(method, dataset).get(option)
            if statement and value in statement.columns:
                return protocol, statement
    return None


def count_changes(line: Line, excluded_options: Collection[str] = ()) -> int:
    """Count the options that a user changed from protocol and data set.

    Numbers with a search space do not count: other rates do not change the method, but another
    switch or initialization may.

    Args:
        line: Row of a table.
        excluded_options: Options that do not count.

    Returns:
        Number of options; 0 for a method that is not installed here.
    """
    config = recorded_config(line.records[0])
    options = config.changed_options(*USER_ORIGINS)
    searched = spaces(METHODS.get(config.method)) if options else {}
    return sum(
        name not in searched or isinstance(value, bool | str)
        for name, value in options.items()
        if name not in excluded_options
    )
