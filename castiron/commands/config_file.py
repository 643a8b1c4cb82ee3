"""Options from a file (``--config``) and from variables (``CASTIRON_...``), besides the command line."""

from __future__ import annotations

import os
import re
from typing import Any

import click
from click.core import ParameterSource

from castiron.errors import CastironError

_PREFIX = "CASTIRON"
#: Of a context's notes: the path of the file.
_FILE = "castiron.config_file"
_SOURCES = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}
#: Shown as set, never with their value.
_SECRET = ("api_key",)
#: Left empty, as a secret that was not mounted leaves them, they would let everybody in.
_NEVER_EMPTY = ("api_key", "api_key_file")


class ConfigurableCommand(click.Command):
    """A command whose options may also come from a variable or from a file, and its arguments from the file.

    The command line goes before the environment, that before the file, that before the default. What is
    refused is told with the place that it came from.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings["auto_envvar_prefix"] = _PREFIX
        self.params.append(
            click.Option(
                ["--config"],
                type=click.Path(exists=True, dir_okay=False),
                is_eager=True,
                expose_value=False,
                callback=_read,
                help="YAML or JSON with options by name (port: 8001). Command line and variables go before "
                "it.",
            )
        )
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                parameter.show_envvar = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read all values; a refused one is told as the variable or the name in the file that has it."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            error.param_hint = _place(ctx, error.param) or error.param_hint
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error that names options is told with where they came from."""
        try:
            return super().invoke(ctx)
        except CastironError as error:
            error.args = (f"{error}{_places_of_named(ctx, str(error))}",)
            raise


def _place(context: click.Context, parameter: click.Parameter | None) -> str | None:
    """The variable, or the file and the name in it, that a value came from; None for any other source."""
    name = (parameter.name or "") if parameter is not None else ""
    source = context.get_parameter_source(name)
    if source is ParameterSource.ENVIRONMENT:
        return f"the variable {_PREFIX}_{name.upper()}"
    if source is ParameterSource.DEFAULT_MAP:
        in_file = next(word for word, known in _parameters(context.command).items() if known is parameter)
        return f"{context.meta[_FILE]}: {in_file}"
    return None


def _places_of_named(context: click.Context, message: str) -> str:
    """Where options came from that a message names (--max-loras, max_loras, port is), to be put behind it."""
    told = []
    for parameter in context.command.params:
        name = parameter.name or ""
        plain = re.escape(name) + ("" if "_" in name else " is ")
        named = rf"--{re.escape(name.replace('_', '-'))}(?![\w-])|(?<![\w-]){plain}(?!\w)"
        if (place := _place(context, parameter)) is not None and re.search(named, message):
            told.append(f"{name} comes from {place}")
    return f" ({'; '.join(told)})" if told else ""


def given_options(context: click.Context) -> list[str]:
    """What was not left at its default, as ``name=value (source)``."""
    found = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = _SOURCES.get(context.get_parameter_source(name) or ParameterSource.DEFAULT)
        if source is None or isinstance(parameter, click.Argument) or not parameter.expose_value:
            continue
        value = context.params.get(name)
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        elif isinstance(parameter.type, click.Choice):
            value = str(value).replace("_", "-")  # as --help spells it
        found.append(f"{name}={'***' if name in _SECRET else value} ({source})")
    return found


def _read(context: click.Context, _option: click.Parameter, path: str | None) -> None:
    for name in _NEVER_EMPTY:
        variable = f"{_PREFIX}_{name.upper()}"
        _refuse_empty(name, os.environ.get(variable, "not set").strip(), variable)
    if path is None:
        return
    context.meta[_FILE] = path
    from castiron.runtime.server.yaml_file import read_mapping, refuse_unknown

    known = _parameters(context.command)
    content: dict[str, Any] = {}
    for name, value in read_mapping(path, "the configuration").items():
        if content.setdefault(name.replace("-", "_"), value) is not value:
            raise click.UsageError(f"{path} has {name!r} twice, with dashes and with underscores")
    refuse_unknown(content, known, path)
    for name, value in content.items():
        _refuse_empty(name, value, f"{path}: {name}")
    context.default_map = {
        known[name].name or name: _as_click_takes_it(known[name], value, f"{path}: {name}")
        for name, value in content.items()
        if value is not None  # left empty: not set
    }


def _refuse_empty(name: str, value: Any, where: str) -> None:
    if name in _NEVER_EMPTY and value in (None, "", []):
        raise click.UsageError(f"{where} is empty; give a value, or take it out to let every client in")


def _parameters(command: click.Command) -> dict[str, click.Parameter]:
    """Parameters by the names that the file has: those of the long options, with underscores."""
    found: dict[str, click.Parameter] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            found[parameter.name or ""] = parameter
            continue
        for option in parameter.opts:
            if option.startswith("--") and option != "--config":
                found[option[2:].replace("-", "_")] = parameter
    return found


def _as_click_takes_it(parameter: click.Parameter, value: Any, where: str) -> Any:
    if parameter.multiple:
        if isinstance(value, dict):  # lora_modules: {sql: ./sql-adapter}
            value = [f"{name}={item}" for name, item in value.items()]
        values = value if isinstance(value, list) else [value]
        if any(item is None or isinstance(item, list | dict) for item in values):
            raise click.UsageError(
                f"{where} holds an item that is no single value; expected a list of values"
            )
        return values
    if isinstance(value, list | dict):
        raise click.UsageError(f"{where} is a {type(value).__name__}; expected one value")
    flag = isinstance(parameter, click.Option) and parameter.is_flag
    if flag != isinstance(value, bool):
        raise click.UsageError(f"{where} is {value!r}; expected {'true or false' if flag else 'a value'}")
    return value
