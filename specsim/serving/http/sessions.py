"""Sessions: conversations whose turns continue one another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from specsim.core.errors import InputError, require, require_int, require_type
from specsim.serving.requests import Request

MOST_SESSIONS = 1024


class EndedTurn(NamedTuple):
    """A turn that ended well."""

    request: Request
    parent: str | None  # name of the turn before it


@dataclass(eq=False, slots=True)
class Session:
    """A conversation, or a tree of them: a turn may continue any earlier one, unless the session only appends."""

    only_appends: bool = False
    turns: dict[str, EndedTurn] = field(default_factory=dict)  # by name, a parent before its children
    kept: Request | None = None  # request of the turn that ended last, whose KV waits for the next one
    running: int | None = None  # id of the request of the turn that runs
    is_closed: bool = False

    def end(self, turn: "SessionTurn", request: Request, rid: str) -> Request | None:
        """Add the running turn, unless it was aborted; return the request whose KV is not needed any more."""
        ended: Request | None = request
        if request.token_ids and request.finish_reason in ("stop", "length") and not self.is_closed:
            if turn.replaces:
                self._drop_after(turn.parent)
            self.turns.pop(rid, None)
            self.turns[rid] = EndedTurn(request, turn.parent)
            ended, self.kept = self.kept, request
        self.running = None
        return ended

    def _drop_after(self, rid: str | None) -> None:
        """Drop the turns that follow another, all where it is None."""
        dropped = {rid}
        for name, turn in list(self.turns.items()):
            if turn.parent in dropped and name != rid:
                dropped.add(name)
                del self.turns[name]


@dataclass(frozen=True, slots=True, eq=False)
class SessionTurn:
    """The place of a request in a session."""

    session: Session
    parent: str | None  # name of the turn that it continues; None: it begins a conversation
    context: list[int]  # tokens of the conversation that stay before its prompt
    replaces: bool  # the turns that follow its parent are dropped


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

        rid: the turn that it continues, by default the one that ended last. offset: tokens of the conversation that
        stay, counted from its end where negative; 0 or null: all. drop_previous_output: the output of the turn that it
        continues does not stay. replace: turns that follow that one are dropped, all of them without a rid.
        """
        params = body.get("session_params")
        if params is None:
            return None
        require_type("session_params", params, dict, "an object with id and rid")
        session = self._find("session_params", params.get("id"))
        require(session.running is None, "session_params", params["id"], "a session whose last turn has ended")
        replaces, drops = (_flag(params, name) for name in ("replace", "drop_previous_output"))
        rid, last = params.get("rid"), next(reversed(session.turns), None)
        changes = replaces or drops or params.get("offset") or rid not in (None, last)
        allowed = "nothing but the last turn's rid: a streaming session only appends"
        require(not (session.only_appends and changes), "session_params", params, allowed)
        if rid is None and not replaces:
            rid = last
        if rid is None:
            return SessionTurn(session, None, [], replaces)
        require(isinstance(rid, str) and rid in session.turns, "rid", rid, "the rid of a turn of the session")
        previous = session.turns[rid].request
        context = previous.prompt_ids if drops else previous.known_ids
        offset = require_int("offset", params.get("offset") or 0, -len(context), len(context))
        return SessionTurn(session, rid, context[: offset or None], replaces)


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    require(value is None or isinstance(value, bool), name, value, "true or false")
    return bool(value)
