"""Where our HTTP extras join SGLang's application; apart from them, as every process imports the hooks."""

from __future__ import annotations

from typing import Any


def add_routes(result: None, app: Any) -> None:
    """After ``add_http_request_metrics_middleware``, which SGLang calls when its application is imported.

    Each route by itself: SGLang looks for the level of a route among those of the application, and does not
    find it inside an included router, whose routes would then all be a user's.
    """
    from .routes import router

    app.router.routes.extend(router.routes)


def accept_browser_logins(result: None, app: Any, *, api_key: str | None, **_: Any) -> None:
    """After ``add_api_key_middleware``: a browser may give the API key as its password."""
    from .browser_login import BrowserLogin

    app.add_middleware(BrowserLogin, api_key=api_key)
