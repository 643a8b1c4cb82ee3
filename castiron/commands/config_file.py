"""Options from a file (``--config``) and from variables (``CASTIRON_...``), besides the command line."""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

_PREFIX = "CASTIRON"
_SOURCES = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}
#: Shown as set, never with their value.
_SECRET = ("api_key",)
#: Left empty, as a secret that was not mounted leaves them, they would let everybody in.
_NEVER_EMPTY = ("api_key", "api_key_file")


def configurable(command: click.Command) -> click.Command:
    """Let options of a command also come from a variable and from a file, and its arguments from the file.

    The command line goes before the environment, that before the file, that before the default.
    """
    command.context_settings["auto_envvar_prefix"] = _PREFIX
    command.params.append(
        click.Option(
            ["--config"],
            type=click.Path(exists=True, dir_okay=False),
            is_eager=True,
            expose_value=False,
            callback=_read,
            help="YAML or JSON with options by name (port: 8001). Command line and variables go before it.",
        )
    )
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            parameter.show_envvar = True
    return command


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
