"""Who may connect to a server."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from diffusion_policy.common.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(host: str, token: str | None) -> None:
    """Raise ConfigError for an address that others can reach without a token."""
    if not token and not is_loopback(host):
        raise ConfigError(f"{host} can be reached by others: a token is needed (--token, or POLICY_SERVER_TOKEN)")


def has_token(headers: Sequence[str], token: str | None) -> bool:
    """Whether the Authorization headers of a request carry the token; the comparison takes the same time for all."""
    if not token:
        return True
    wanted = f"Api-Key {token}".encode()
    return len(headers) == 1 and hmac.compare_digest(headers[0].encode("utf-8", "surrogateescape"), wanted)
