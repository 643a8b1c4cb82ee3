"""The exception family. Every error a user can cause is one of these, raised where the input enters."""


class CastironError(Exception):
    """Base of all errors that castiron raises on purpose; the command line prints it without a traceback."""


class CheckpointError(CastironError):
    """The checkpoint folder is incomplete, inconsistent or in a form that cannot be read."""


class UnsupportedModelError(CastironError):
    """The model's code or configuration holds what castiron does not translate; names the module."""


class BuildError(CastironError):
    """The engine cannot be built with the options given, or the numeric check against the source failed."""


class EngineError(CastironError):
    """An engine folder is missing, damaged, made for another version, or made for another device."""


class RequestError(CastironError):
    """A request that cannot be served as it stands: a bad parameter or a prompt over the engine's limits."""
