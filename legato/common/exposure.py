"""Warnings at start-up about who can reach the server."""

from __future__ import annotations

import ipaddress
import ssl
import sys
from collections.abc import Sequence

from legato.common.errors import OptionError
from legato.common.frontend import HttpOptions


def command_line_warnings(words: Sequence[str] | None = None) -> list[str]:
    """About secrets in the command line of this process, which every user of the machine can read."""
    words = sys.argv if words is None else words
    remedies = {
        "--api-key": "set the environment variable API_KEY or use --api-key-file",
        "--route-key": "set the environment variable ROUTE_KEY",
        "--cluster-key": "set the environment variable CLUSTER_KEY or use --cluster-key-file",
    }
    return [
        f"{flag} is on the command line, where other users of this machine can read it (ps): {remedy}"
        for flag, remedy in remedies.items()
        if any(word == flag or word.startswith(f"{flag}=") for word in words)
    ]


def exposure_warnings(options: HttpOptions) -> list[str]:
    """About clients that nobody has to invite."""
    if options.api_key or options.api_key_file is not None:
        return []
    warnings = []
    if not is_loopback(options.hostname):
        warnings.append(
            f"There is no API key: whoever reaches {options.hostname} port {options.port} can use this server;"
            " give --api-key-file, or listen on this machine alone with --hostname 127.0.0.1"
        )
    if not options.cors_allow_origin or "*" in options.cors_allow_origin:
        warnings.append(
            "There is no API key and CORS allows any origin: every web page that a user of this network visits can send"
            " requests to this server; give --api-key-file or --cors-allow-origin"
        )
    return warnings


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """For connections that are encrypted. None without a certificate."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None:
        raise OptionError("--ssl-keyfile needs --ssl-certfile")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # The password keeps OpenSSL from asking for one on the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except ssl.SSLError as error:
        raise OptionError(
            f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile}: not a certificate and its unencrypted private key in"
            f" PEM format ({error.reason or 'PEM'})"
        ) from None
    except OSError as error:
        raise OptionError(f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile}: {error.strerror}") from None
    return context


def is_loopback(hostname: str) -> bool:
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        return hostname == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
