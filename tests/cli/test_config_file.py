"""Options of serve-engine from the command line, the environment and a file."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from castiron.cli import main
from castiron.commands import serve_engine
from castiron.commands.config_file import ConfigurableCommand, given_options
from castiron.commands.server_options import server_options
from castiron.errors import EngineError


@pytest.fixture
def resolve(tmp_path, monkeypatch):
    """What serve-engine's options come to, for arguments, variables and a file; or why it refuses them."""
    monkeypatch.delenv("CASTIRON_CONFIG", raising=False)

    def run(*arguments, env=None, file=None, name="c.yaml"):
        if file is not None:
            (tmp_path / name).write_text(file)
            arguments = (*arguments, "--config", str(tmp_path / name))
        for variable, value in (env or {}).items():
            monkeypatch.setenv(variable, value)
        try:
            context = serve_engine.command.make_context("serve-engine", list(arguments))
        except (click.ClickException, EngineError) as e:
            return None, e.format_message() if isinstance(e, click.ClickException) else str(e)
        return {**context.params, "given": given_options(context)}, ""

    return run


@pytest.mark.parametrize(
    ("arguments", "env", "file", "port"),
    [
        ((), {}, None, 8000),
        ((), {}, "port: 4", 4),
        ((), {"CASTIRON_PORT": "3"}, "port: 4", 3),
        (("--port", "2"), {"CASTIRON_PORT": "3"}, "port: 4", 2),
        (("--port", "2"), {}, "port: 4", 2),
        ((), {"CASTIRON_PORT": "3"}, None, 3),
    ],
)
def test_the_command_line_goes_before_the_environment_before_the_file_before_the_default(
    resolve, arguments, env, file, port
):
    found, _ = resolve("E", *arguments, env=env, file=file)
    assert found["port"] == port


@pytest.mark.parametrize("spelled", ["max_utilization", "max-utilization"])
def test_a_policy_may_be_spelled_with_hyphens_and_is_shown_so(spelled):
    context = serve_engine.command.make_context(
        "serve-engine",
        ["E", "--capacity-scheduler-policy", spelled],
        parent=click.Context(main, **main.context_settings),
    )
    assert context.params["capacity_scheduler_policy"] == "max_utilization"
    assert given_options(context) == ["capacity_scheduler_policy=max-utilization (command line)"]


def test_every_kind_of_option_can_stand_in_a_file_in_yaml_and_in_json(resolve):
    content = {
        "engine": "E",
        "allowed-origins": ["https://a", "https://b"],
        "api_key": "sk-one-and-only",
        "shutdown_timeout": 2.5,
        "disable_access_log": True,
        "enable_prefix_caching": False,
        "lora_modules": {"sql": "./sql", "chat": "./chat"},
        "max_batch_size": 7,
        "log_format": "json",
    }
    for name, text in (("c.json", json.dumps(content)), ("c.yaml", json.dumps(content, indent=1))):
        found, message = resolve(file=text, name=name)
        assert found is not None, message
        assert found["engine"] == "E"
        assert found["allowed_origins"] == ("https://a", "https://b")
        assert found["api_key"] == ("sk-one-and-only",)
        assert found["shutdown_timeout"] == 2.5
        assert found["disable_access_log"] is True
        assert found["enable_prefix_caching"] is False
        assert found["lora_modules"] == ("sql=./sql", "chat=./chat")
        assert (found["max_batch_size"], found["log_format"]) == (7, "json")
        assert "sk-one" not in " ".join(found["given"])
        assert "max_batch_size=7 (file)" in found["given"]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("prot: 1", "did you mean port"),
        ("max_batchsize: 1", "did you mean max_batch_size"),
        ("config: x", "unknown name 'config'"),
        ("port: [1]", "expected one value"),
        ("port: true", "expected a value"),
        ("disable_access_log: 1", "true or false"),
        ("port: many", "'many' is not a valid"),
        ("- port", "expected names with values"),
        ("port: 1\nhost: x\nport: 2", "'port' is there twice"),
        ("log_level: info\nlog-level: error", "with dashes and with underscores"),
        ("1: port", "1, which is no text"),
        ("api_key: [[sk-in-a-list]]", "expected a list of values"),
        ("allowed_origins: [null]", "expected a list of values"),
        ("shutdown_timeout: .nan", "no finite number"),
        ("request_read_timeout: .inf", "not in the range"),
        ("port: {", "cannot be read"),
        ("scheduling_policy: fastest", "fastest"),
    ],
)
def test_what_makes_no_sense_in_a_file_is_refused(resolve, file, says):
    found, message = resolve("E", file=file)
    assert found is None
    assert says in message


@pytest.mark.parametrize(
    ("env", "file", "says"),
    [
        ({"CASTIRON_PORT": "many"}, None, "Invalid value for the variable CASTIRON_PORT: 'many'"),
        ({"CASTIRON_LOG_LEVEL": "loud"}, "port: 1", "Invalid value for the variable CASTIRON_LOG_LEVEL"),
        ({"CASTIRON_DISABLE_PAGE": "7"}, None, "Invalid value for the variable CASTIRON_DISABLE_PAGE"),
        ({"CASTIRON_CONFIG": "/nowhere.yaml"}, None, "Invalid value for the variable CASTIRON_CONFIG"),
        ({"CASTIRON_LORA_MODULES": "a=b a=c"}, None, "variable CASTIRON_LORA_MODULES: the name 'a'"),
        ({}, "port: 99999", "Invalid value for {path}: port: 99999 is not in the range"),
        ({}, "scheduling-policy: fastest", "Invalid value for {path}: scheduling_policy: 'fastest'"),
        ({}, "lora_modules: [sql]", "Invalid value for {path}: lora_modules: 'sql'; expected NAME=FOLDER"),
        ({"CASTIRON_HOST": "x"}, "host: y\nmax_loras: 0", "Invalid value for {path}: max_loras: 0 is not"),
    ],
)
def test_a_refused_value_is_told_with_its_source(resolve, tmp_path, env, file, says):
    found, message = resolve("E", env=env, file=file)
    assert found is None
    assert says.format(path=tmp_path / "c.yaml") in message
    assert "'--" not in message


def test_a_typed_value_is_told_by_its_option(resolve):
    found, message = resolve("E", "--port", "many", env={"CASTIRON_PORT": "1"}, file="port: 2")
    assert (found, "Invalid value for '--port': 'many'" in message) == (None, True)


@pytest.mark.parametrize(
    ("arguments", "env", "file", "says"),
    [
        (
            (),
            {"CASTIRON_RAY_ADDRESS": "auto"},
            None,
            "2 or more (ray_address comes from the variable CASTIRON_RAY_ADDRESS)",
        ),
        (
            (),
            {},
            "ssl_keyfile: {path}",
            "--ssl-keyfile needs --ssl-certfile, the server's certificate (ssl_keyfile comes from "
            "{path}: ssl_keyfile)",
        ),
        (("--ray-address", "auto"), {"CASTIRON_PORT": "0"}, "host: 127.0.0.1", "--replicas 2 or more\n"),
    ],
)
def test_an_error_that_names_options_says_where_they_came_from(tmp_path, arguments, env, file, says):
    path = tmp_path / "c.yaml"
    if file is not None:
        path.write_text(file.format(path=path))
        arguments = (*arguments, "--config", str(path))
    ran = CliRunner().invoke(main, ["serve-engine", "E", *arguments], env=env)
    assert ran.exit_code == 1
    assert says.format(path=path) in ran.stderr


def test_a_name_left_empty_in_a_file_is_not_set(resolve):
    found, message = resolve("E", file="host:\nport: null\nallowed_origins:\ndisable_page:\n")
    assert found is not None, message
    assert (found["host"], found["port"], found["allowed_origins"]) == ("127.0.0.1", 8000, ())
    assert (found["disable_page"], found["given"]) == (False, [])


def test_a_name_that_is_there_twice_is_refused_in_json_too_and_yaml_may_merge(resolve):
    found, message = resolve("E", file='{"port": 1, "port": 2}', name="c.json")
    assert found is None
    assert "'port' is there twice" in message
    found, message = resolve("E", file="lora_modules: {<<: {sql: /a, chat: /c}, sql: /b}")
    assert found is not None, message
    assert set(found["lora_modules"]) == {"sql=/b", "chat=/c"}


def test_keys_come_from_a_variable_between_spaces(resolve):
    found, _ = resolve("E", env={"CASTIRON_API_KEY": "sk-first-key sk-second-key"})
    assert found["api_key"] == ("sk-first-key", "sk-second-key")
    assert found["given"] == ["api_key=*** (environment)"]


@pytest.mark.parametrize(
    ("env", "file"),
    [
        ({"CASTIRON_API_KEY": ""}, None),
        ({"CASTIRON_API_KEY_FILE": " "}, None),
        ({}, "api_key:"),
        ({}, "api-key: []"),
        ({}, "api_key_file: ''"),
    ],
)
def test_keys_left_empty_do_not_let_everybody_in(resolve, env, file):
    found, message = resolve("E", env=env, file=file)
    assert found is None
    assert "is empty" in message


def test_help_names_the_variable_of_every_option():
    shown = CliRunner().invoke(main, ["serve-engine", "--help"], terminal_width=200).output
    shown = " ".join(shown.split())  # lines are broken anywhere
    for parameter in serve_engine.command.params:
        if isinstance(parameter, click.Option):
            assert f"env var: CASTIRON_{parameter.name.upper()}" in shown, parameter.name


def test_other_commands_read_no_variables_of_the_server():
    @click.command(cls=ConfigurableCommand)
    @server_options
    def one(http):
        click.echo(http["port"])

    @click.command()
    @server_options
    def other(http):
        click.echo(http["port"])

    for command, port in ((one, "5"), (other, "8000")):
        assert CliRunner().invoke(command, [], env={"CASTIRON_PORT": "5"}).output.strip() == port
