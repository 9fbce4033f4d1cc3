"""Trie of all paths of up to `depth` tokens in some texts, with their counts, extended token by token.

A path that occurs once is a leaf, which stores its position instead of what follows it. So a text without repetitions
takes one node for each token, and every token is added in at most `depth` steps.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar


class TrieNode:
    """A path of the trie; the texts contain it `count` times."""

    __slots__ = ("children", "count", "start", "text")

    def __init__(self, text: list[int], start: int) -> None:
        self.text = text
        self.start = start  # of the path's last occurrence, in `text`
        self.count = 1
        self.children: dict[int, TrieNode] | None = None  # by token; None: a leaf, which continues as its text does


class Path(NamedTuple):
    """A place in the trie: a node, or a continuation of a leaf."""

    node: TrieNode
    length: int  # tokens of the path


class Follower(NamedTuple):
    """A token that follows a path."""

    token: int
    occurrences: int  # of the path with this token
    start: int  # of the last occurrence
    path: Path

    @property
    def rank(self) -> tuple[int, int]:
        """Order among the followers of a path: the most frequent first, ties to the lower token id."""
        return -self.occurrences, self.token


class CountedTrie:
    """A trie of closed texts and of an open one, to which tokens are appended."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._first: dict[int, TrieNode] = {}
        self._root = TrieNode([], 0)
        self._root.children = self._first
        self.open()

    def open(self) -> None:
        """Close the text, and begin one that no path of the former continues into."""
        self.text: list[int] = []
        self._suffixes: deque[TrieNode] = deque()  # nodes of the last tokens of the text, the longest suffix first

    def append(self, token: int) -> None:
        """Add a token to the open text, and every path that it ends."""
        self.text.append(token)
        self._suffixes.append(self._root)
        if len(self._suffixes) > self._depth:
            self._suffixes.popleft()
        first = len(self.text) - len(self._suffixes)  # start of the longest suffix
        for index, node in enumerate(self._suffixes):
            if node.children is not None:
                self._suffixes[index] = self._descend(node, node.children, first + index)

    def remove(self, text: list[int]) -> None:
        """Remove a closed text; what was the last occurrence of a path stays."""
        for start in range(len(text)):
            children = self._first
            for token in text[start : start + self._depth]:
                child = children[token]
                child.count -= 1
                if child.children is None or child.count == 0:
                    del children[token]
                    break
                children = child.children

    def suffix(self, length: int) -> Path:
        """Find the last tokens of the open text; length: at most the depth and the length of the text."""
        return Path(self._suffixes[-length], length)

    def find(self, tokens: Sequence[int]) -> Path | None:
        """Find a path, None where no text contains it."""
        path = Path(self._root, 0)
        for token in tokens:
            following = next((follower.path for follower in self.followers(path, token)), None)
            if following is None:
                return None
            path = following
        return path

    def followers(self, path: Path, token: int | None = None) -> Iterator[Follower]:
        """List the tokens that follow a path, or only the one given, in no particular order."""
        node, length = path
        if length == self._depth:
            return
        if node.children is None:
            end = node.start + length
            if end < len(node.text) and token in (None, node.text[end]):
                yield Follower(node.text[end], 1, node.start, Path(node, length + 1))
            return
        children = node.children
        for next_token in children if token is None else {token} & children.keys():
            child = children[next_token]
            yield Follower(next_token, child.count, child.start, Path(child, length + 1))

    def _descend(self, node: TrieNode, children: dict[int, TrieNode], start: int) -> TrieNode:
        """Move the suffix from `start` of the open text to the child for the text's last token."""
        token = self.text[-1]
        child = children.get(token)
        if child is None:
            children[token] = TrieNode(self.text, start)
            return children[token]
        if child.children is None:
            self._expand(child, len(self.text) - start)
        child.count += 1
        child.text = self.text
        child.start = start
        return child

    def _expand(self, leaf: TrieNode, length: int) -> None:
        """Give a leaf for a path of this length its child, and move the open suffix that continues into it."""
        leaf.children = {}
        end = leaf.start + length
        if end == len(leaf.text) or length == self._depth:
            return
        child = leaf.children[leaf.text[end]] = TrieNode(leaf.text, leaf.start)
        index = leaf.start - (len(self.text) - len(self._suffixes))
        if leaf.text is self.text and index >= 0:
            self._suffixes[index] = child


class TextStructure(Protocol):
    """A structure over a text."""

    text: list[int]

    def append(self, token: int) -> None:
        """Add a token to the text."""
        ...


AnyStructure = TypeVar("AnyStructure", bound=TextStructure)


class RequestTexts(Generic[AnyStructure]):
    """One structure for each request."""

    def __init__(self, make: Callable[[], AnyStructure]) -> None:
        self._make = make
        self._structures: dict[int, AnyStructure] = {}

    def follow(self, request_id: int, tokens: Sequence[int]) -> AnyStructure:
        """Extend the request's structure to these tokens.

        It is made again if its text is no prefix of them, for instance because another run reuses the request id.
        """
        structure = self._structures.get(request_id)
        if structure is None or list(tokens[: len(structure.text)]) != structure.text:
            structure = self._structures[request_id] = self._make()
        for token in tokens[len(structure.text) :]:
            structure.append(token)
        return structure

    def drop(self, request_id: int) -> None:
        """Forget a request, known or not."""
        self._structures.pop(request_id, None)
