"""Where a gateway listens and who may ask it.

Owns the rule that an address which other machines can reach needs a token, and the errors of taking
an address. Knows no requests.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from offbeat.errors import ConfigError

TOKEN_VARIABLE = "OFFBEAT_TOKEN"
"""Names the token in the environment: unlike an argument, other users cannot read it there."""


def resolve_token(host: str, token: str | None, *, key: str) -> str | None:
    """The token that clients must send: as given, else that of ``OFFBEAT_TOKEN``, else none.

    Args:
        key: what stands before ``host`` and ``token`` where they were given ("gateway.", "--").

    Raises:
        ConfigError: other machines can reach ``host``, and there is no token.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"{key}host: other machines can reach {host}, and there is no token; set {key}token or "
            f"the environment variable {TOKEN_VARIABLE}, or use host 127.0.0.1"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def listening(host: str, port: int, *, key: str) -> Iterator[socket.socket]:
    """A socket that listens there; questions wait in it until a gateway takes it over.

    Raises:
        ConfigError: the address cannot be taken, and why.
    """
    with _bound(host, port, key) as at:
        yield at


def _bound(host: str, port: int, key: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except socket.gaierror as exc:
        raise ConfigError(f"{key}host: {host} is no address of this machine: {exc}") from exc
    except OSError as exc:
        ways = {
            errno.EADDRINUSE: (f"{key}port", "choose another, or 0 for any that is free"),
            errno.EACCES: (f"{key}port", "choose one above 1023"),
        }
        where, way = ways.get(exc.errno or 0, (f"{key}host", "choose an address of this machine"))
        why = os.strerror(exc.errno) if exc.errno else str(exc)
        raise ConfigError(f"{where}: cannot listen at {host} port {port}: {why}; {way}") from exc
