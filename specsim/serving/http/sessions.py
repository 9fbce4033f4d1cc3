"""Sessions: conversations whose turns continue one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from specsim.core.errors import InputError, require, require_int, require_type
from specsim.serving.requests import Request

MOST_SESSIONS = 1024


@dataclass(eq=False, slots=True)
class Session:
    """A conversation, one turn after the other."""

    only_appends: bool = False
    last: Request | None = None  # request of the last turn that ended well, whose KV waits for the next one
    rid: str | None = None  # that turn's name
    running: int | None = None  # id of the request of the turn that runs
    is_closed: bool = False

    def end(self, request: Request, rid: str) -> Request | None:
        """Add the turn that ran, unless it was aborted; return the request whose KV is not needed any more."""
        self.running = None
        if self.is_closed or not request.token_ids or request.finish_reason not in ("stop", "length"):
            return request
        ended, self.last, self.rid = self.last, request, rid
        return ended


class SessionTurn(NamedTuple):
    """The next turn of a session."""

    session: Session
    context: list[int]  # tokens of the conversation that stay before its prompt


class Sessions:
    """Open sessions by their ids."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, body: Mapping[str, Any]) -> str:
        """Open a session, and return its id.

        streaming: turns are only appended, as in SGLang's streaming sessions.
        """
        require_int("capacity_of_str_len", body.get("capacity_of_str_len", 1), 0, 2**62)
        name = body.get("session_id") or uuid4().hex
        require_type("session_id", name, str, "a text")
        require(name not in self._sessions, "session_id", name, "the id of no open session")
        require(len(self._sessions) < MOST_SESSIONS, "session_id", name, f"at most {MOST_SESSIONS} open sessions")
        self._sessions[name] = Session(_flag(body, "streaming"))
        return name

    def close(self, body: Mapping[str, Any]) -> Session:
        """Remove a session, and return it."""
        session = self._find("session_id", body.get("session_id"))
        del self._sessions[body["session_id"]]
        return session

    def _find(self, field_name: str, name: Any) -> Session:
        session = self._sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise InputError(field_name, name, "the id of an open session")
        return session

    def turn(self, body: Mapping[str, Any]) -> SessionTurn | None:
        """Read the place of a request in its session, None for one without a session.

        offset: tokens of the conversation that stay, counted from its end where negative; 0 or null: all.
        drop_previous_output: the output of the last turn does not stay.
        """
        params = body.get("session_params")
        if params is None:
            return None
        require_type("session_params", params, dict, "an object with id and rid")
        session = self._find("session_params", params.get("id"))
        require(session.running is None, "session_params", params["id"], "a session whose last turn has ended")
        rid = params.get("rid")
        require(rid in (None, session.rid), "rid", rid, "the rid of the session's last turn")
        replaces, drops = (_flag(params, name) for name in ("replace", "drop_previous_output"))
        require(
            not replaces or rid == session.rid, "replace", True, "false, or the last turn's rid, which none follows"
        )
        last = session.last
        context = [] if last is None else last.prompt_ids if drops else last.known_ids
        offset = require_int("offset", params.get("offset") or 0, -len(context), len(context))
        appends = not (offset or drops or replaces)
        require(
            appends or not session.only_appends, "session_params", params, "id and rid alone in a streaming session"
        )
        return SessionTurn(session, context[: offset or None])


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    require(value is None or isinstance(value, bool), name, value, "true or false")
    return bool(value)
