"""The messages of errors that end a command."""

from torchobj import exceptions
from torchobj.cli.options import CommandError, described


def test_errors_are_one_line_with_the_next_step():
    error = exceptions.CredentialsError("get s3://b/k: no credentials\nfound")
    assert described(error).startswith("get s3://b/k: no credentials found; `torchobj doctor URL`")
    error.url = "s3://b/k"
    assert "; `torchobj doctor s3://b/k` shows" in described(error)
    error = exceptions.CredentialsError("no credentials; S3Options(anonymous=True) for a public bucket")
    assert described(error).startswith("no credentials; --no-sign-request for a public bucket; ")
    denied = exceptions.AccessDeniedError("get file:///d/x: permission denied")
    denied.url = "file:///d/x"
    assert described(denied) == f"{denied}; check the permissions of the file and of the folders above it"
    missing = exceptions.ObjectNotFoundError("get file:///d/x: no such file")
    missing.url = "file:///d/x"
    assert described(missing) == str(missing)
    assert described(CommandError("s3://b/\x1b[31m: no")) == "s3://b/\\x1b[31m: no"
    assert described(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    assert described(ZeroDivisionError("division")).startswith("unexpected ZeroDivisionError: division; --log-level")
