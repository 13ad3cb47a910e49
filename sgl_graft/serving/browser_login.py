"""What SGLang's check of API keys leaves to be said about ``/graft/*``.

A browser cannot send ``Authorization: Bearer`` with an address that somebody types, but it can ask for a
password. On the page's own addresses the password is taken for the key; whether the key is right is SGLang's
decision. Only requests that look at something are helped, and none that another site's script makes, so a
browser that remembers the password cannot be used against the server.

And SGLang answers 401 to whoever brings the wrong key. Who brings the right one of the wrong role, a user's
to an administrator's route, is told so with status 403.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = frozenset({"/graft/", "/graft/status", "/graft/tree"})
CHALLENGE = (
    b"www-authenticate",
    b'Basic realm="sgl_graft: any name, the API key as password", charset="UTF-8"',
)
WRONG_ROLE = b'{"error":"Forbidden: this needs the administrator\'s key (--admin-api-key)"}'


class BrowserLogin:
    """Turns a browser's password into a bearer key, and tells people which key they lack.

    Args:
        app: the application with SGLang's check of keys.
        api_key: the users' key, None where there is none.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self._user = b"Bearer " + api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/graft/"):
            await self.app(scope, receive, send)
            return
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        given = dict(headers)
        if scope["path"] in PATHS and scope["method"] == "GET" and b"origin" not in given:
            headers = [
                (name, bearer(value) if name == b"authorization" else value) for name, value in headers
            ]
            scope = {**scope, "headers": headers}
        key = dict(headers).get(b"authorization", b"")
        is_user = self._user is not None and secrets.compare_digest(key, self._user)
        await self.app(scope, receive, _Explaining(send, is_user, asks=scope["path"] == "/graft/"))


class _Explaining:
    """Passes an answer on; a 401 asks browsers for a password, or becomes a 403 for a user's key."""

    def __init__(self, send: Send, is_user: bool, asks: bool) -> None:
        self._send, self._is_user, self._asks = send, is_user, asks
        self._forbidden = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 401:
            if self._is_user:
                self._forbidden = True
                await self._forbid()
                return
            if self._asks:  # a status that asked would bring the question up again and again
                message = {**message, "headers": [*message.get("headers", ()), CHALLENGE]}
        if not self._forbidden:
            await self._send(message)

    async def _forbid(self) -> None:
        length = str(len(WRONG_ROLE)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._send({"type": "http.response.start", "status": 403, "headers": headers})
        await self._send({"type": "http.response.body", "body": WRONG_ROLE})


def bearer(value: bytes) -> bytes:
    """A header with a password as one with a key; any other as it is."""
    scheme, _, encoded = value.partition(b" ")
    if scheme.lower() != b"basic":
        return value
    try:
        _name, colon, key = base64.b64decode(encoded, validate=True).partition(b":")
    except binascii.Error:
        return value
    return b"Bearer " + key if colon else value
