"""Who may ask, and what is said about an address that cannot be taken."""

from __future__ import annotations

import socket

import pytest

from offbeat.errors import ConfigError
from offbeat.generate.gateway.access import TOKEN_VARIABLE, listening, resolve_token


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_on_loopback_a_token_is_optional(host: str) -> None:
    assert resolve_token(host, None, key="--") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_an_address_that_others_can_reach_needs_a_token(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"--host: other machines can reach {host}") as caught:
        resolve_token(host, None, key="--")
    assert "--token" in str(caught.value)
    assert TOKEN_VARIABLE in str(caught.value)
    assert resolve_token(host, "given", key="--") == "given"
    monkeypatch.setenv(TOKEN_VARIABLE, "from outside")
    assert resolve_token(host, None, key="--") == "from outside"
    assert resolve_token(host, "given", key="--") == "given"


def test_a_port_that_is_taken_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=rf"gateway\.port: .*port {port}: .* in use; choose"),
            listening("127.0.0.1", port, key="gateway."),
        ):
            pass


def test_an_address_of_another_machine_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"--host: cannot listen at 192\.0\.2\.1 port 0"),
        listening("192.0.2.1", 0, key="--"),
    ):
        pass


def test_the_port_is_free_again_after_the_block() -> None:
    with listening("127.0.0.1", 0, key="--") as at:
        port = at.getsockname()[1]
    with listening("127.0.0.1", port, key="--") as again:
        assert again.getsockname()[1] == port
