"""GET /ui, /dashboard and the files that they load. Only the data behind them needs a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from legato.api.errors import NotFound

Handler = Callable[[Request], Awaitable[Response]]

PAGES = ("ui", "dashboard")
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Scripts and styles are files of ours; nothing else is loaded, and no other page may embed these.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A new version of the server may have other files: ask every time.
    "cache-control": "no-cache",
}


class PageRoutes:
    def __init__(self, health: Handler, observe: Callable[[], Awaitable[bytes]], first: str = "ui") -> None:
        """`health` answers GET / for programs, `observe` gets the data of the dashboard; `first` is where GET / leads
        browsers."""
        self._health = health
        self._first = first
        self._observe = observe
        folder = files("legato.http.pages").joinpath("static")
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/", self.root),
            *(Route(f"/{name}", self._page(f"{name}.html")) for name in PAGES),
            Route("/dashboard/data", self.data),
            Route("/pages/{name}", self.file),
        ]

    async def root(self, request: Request) -> Response:
        """Browsers ask for HTML. Everybody else gets TGI's answer."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(self._first, 303, HEADERS)
        return await self._health(request)

    async def data(self, request: Request) -> Response:
        return Response(await self._observe(), media_type="application/json", headers={"cache-control": "no-store"})

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        media_type = MEDIA_TYPES.get(name.rpartition(".")[2])
        if media_type is None or name not in self._files:
            raise NotFound("File not found")
        return Response(self._files[name], media_type=media_type, headers=HEADERS)

    def _page(self, name: str) -> Handler:
        async def show(request: Request) -> Response:
            return Response(self._files[name], media_type="text/html", headers=HEADERS)

        return show
