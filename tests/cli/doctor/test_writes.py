"""The objects that `torchobj doctor --write` writes, and deletes however it ends."""

import signal

import pytest

import torchobj
from tests.support.interrupting import HELD_BACK_S
from tests.support.prefetching import eventually
from torchobj import exceptions
from torchobj.cli.doctor import store, writes


@pytest.mark.parametrize(
    ("failure", "why"),
    [(KeyboardInterrupt(), "was interrupted"), (exceptions.AccessDeniedError("delete: 403"), "failed (delete: 403")],
    ids=["interrupted", "denied"],
)
def test_the_object_of_an_interrupted_check_that_is_not_deleted_is_named(monkeypatch, failure, why):
    def fail_with(error):
        def fail(*_, **__):
            raise error

        return fail

    memory = torchobj.Store("memory://interrupted")
    monkeypatch.setattr(torchobj.Store, "get", fail_with(KeyboardInterrupt()))
    monkeypatch.setattr(torchobj.Store, "delete", fail_with(failure))
    with pytest.raises(KeyboardInterrupt) as caught:
        writes.put(memory, "a {b}/")
    message = str(caught.value)
    assert message.startswith("interrupted; memory://interrupted/a {b}/") and f"its deletion {why}" in message


@pytest.mark.providers("s3", "gs")
def test_write_deletes_its_own_object_only(cli, bucket, control):
    bucket.write("train/k", b"1")
    found = cli.checks(f"{bucket.url}/train/", "--write")
    assert (found["PUT"]["state"], found["conditions"]["state"]) == ("ok", "ok") and bucket.keys() == ["train/k"]
    deleted = {request.key for request in control.requests() if request.method == "DELETE"}
    assert len(deleted) == 2 and all(key.startswith("train/.torchobj-doctor-") for key in deleted)


@pytest.mark.providers("s3", "gs")
def test_an_object_that_could_not_be_read_back_is_deleted(cli, bucket, control):
    control.faults({"operation": "GetObject", "action": {"status": 403, "code": "AccessDenied"}})
    done = cli.run("doctor", f"{bucket.url}/train/", "--write", "--json")
    assert done.exit_code == 1 and bucket.keys() == []


@pytest.mark.providers("s3", "gs")
def test_an_object_whose_write_had_no_response_is_deleted(cli, bucket, control, monkeypatch):
    """The server stores the object, and the command does not wait for the response for minutes."""
    monkeypatch.setattr(store, "_WRITE_LIMIT_S", 0.3)
    control.faults({"operation": "PutObject", "action": {"delay_first_byte_s": HELD_BACK_S}})
    shown = cli.run("doctor", f"{bucket.url}/train/", "--write").output
    assert control.requests("PutObject") and bucket.keys() == [] and "may exist" not in shown


@pytest.mark.providers("s3", "gs")
def test_an_object_that_could_not_be_deleted_after_a_failed_check_is_named(cli, bucket, control, monkeypatch):
    monkeypatch.setattr(store, "_WRITE_LIMIT_S", 0.3)
    denied = {"action": {"status": 403, "code": "AccessDenied"}}
    control.faults({"operation": "GetObject"} | denied, {"operation": "DeleteObject"} | denied)
    found = cli.checks(f"{bucket.url}/a b/", "--write", fails=True)["PUT"]["found"]
    [key] = bucket.keys()
    left = f"{bucket.url}/{key} may exist, because its deletion failed"
    assert left in found and f"`torchobj rm '{bucket.url}/{key}'` deletes it" in found


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("skip", [0, 2], ids=["PUT", "conditions"])
def test_an_interrupted_write_is_deleted(cli, bucket, control, skip):
    control.faults({"operation": "PutObject", "skip": skip, "action": {"delay_first_byte_s": HELD_BACK_S}})
    process = cli.start("doctor", f"{bucket.url}/train/", "--write", stdout=-1, stderr=-1)
    assert eventually(lambda: len(control.requests("PutObject")) > skip and len(bucket.keys()) == 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HELD_BACK_S / 2)
    assert (process.returncode, err) == (130, b"torchobj: interrupted\n") and bucket.keys() == []


@pytest.mark.parametrize(
    ("flag", "state", "found"),
    [("ignores_conditions", "warning", "(overwrite=False)"), ("refuses_if_match", "note", "refuses If-Match")],
)
def test_conditions_that_the_server_does_not_compare_are_named(cli, bucket, control, flag, state, found):
    control.bucket(bucket.name, {flag: True})
    check = cli.checks(bucket.url, "--write")["conditions"]
    assert check["state"] == state and found in check["found"]
    assert bucket.keys() == []


@pytest.mark.parametrize(("method", "skip"), [("PUT", 1), ("PUT", 2), ("DELETE", 2)])
def test_a_condition_that_could_not_be_tried_is_a_failed_check(cli, bucket, control, method, skip):
    operation = {"PUT": "PutObject", "DELETE": "DeleteObject"}[method]
    control.faults({"operation": operation, "skip": skip, "action": {"status": 403, "code": "AccessDenied"}})
    check = cli.checks(bucket.url, "--write", fails=True)["conditions"]
    assert check["state"] == "failed" and "accepts the credentials" in check["advice"]
    assert "torchobj doctor" not in check["found"]
