"""The handshake: who receives the descriptor."""

import os
import secrets

import pytest

from torchobj.ranks.shared_read import handshake

SECRET = bytes(range(32))


@pytest.fixture
def offered():
    name, descriptor = f"torchobj-test-{secrets.token_hex(8)}", os.memfd_create("offered")
    os.write(descriptor, b"content")
    with handshake.Offer(name, SECRET, descriptor):
        yield name
    os.close(descriptor)


def test_the_descriptor_arrives(offered):
    for _ in range(3):
        received = handshake.receive(offered, SECRET)
        assert os.pread(received, 10, 0) == b"content"
        assert not os.get_inheritable(received)
        os.close(received)


def test_it_does_not_arrive_with_another_secret(offered):
    assert handshake.receive(offered, bytes(32)) is None
    assert handshake.receive(offered, b"") is None
    os.close(handshake.receive(offered, SECRET))


@pytest.mark.parametrize("side", ["offers", "receives"])
def test_a_process_of_another_user_is_not_joined(offered, monkeypatch, side):
    # As if the process at the other end had another user.
    users = iter([os.geteuid() + 1] if side == "receives" else [os.geteuid(), os.geteuid() + 1])
    real = handshake._user_of
    monkeypatch.setattr(handshake, "_user_of", lambda connection: next(users, real(connection)))
    assert handshake.receive(offered, SECRET) is None


def test_a_name_is_offered_once_and_is_free_afterwards(offered):
    descriptor = os.memfd_create("second")
    with pytest.raises(OSError, match="in use"):
        handshake.Offer(offered, SECRET, descriptor)
    name = offered + "-2"
    for _ in range(2):
        handshake.Offer(name, SECRET, descriptor).close()
    assert handshake.receive(name, SECRET) is None
    os.close(descriptor)
