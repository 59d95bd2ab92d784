"""The suite itself cannot reach the network: a test that tries fails instead of depending on a server."""

import socket

import pytest
from pytest_socket import SocketConnectBlockedError


def test_an_address_outside_this_machine_is_refused():
    with socket.socket() as client, pytest.raises(SocketConnectBlockedError):
        client.connect(("192.0.2.1", 80))  # RFC 5737: an address that belongs to nobody


def test_loopback_is_open():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()
