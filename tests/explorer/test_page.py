"""Page of the explorer in a real browser: steps, pointing, keys, widths, colours, and figures equal to the trace's."""

from dataclasses import replace

import pytest

import specsim
from specsim import SamplingParams, SpecConfig
from specsim.explorer.explore import page_html

from .kinds import KINDS, recorded

PHASES = ["draft", "draft2", "draft3", "select", "mask", "verify", "commit", "extend"]
CONTRAST = """
() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).slice(0, 3).map((each) => each / 255)
      .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = getComputedStyle(at).backgroundColor;
      if (parts(found)[3] !== 0) return found;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = [];
  for (const element of document.querySelectorAll(".specsim-explorer *")) {
    const own = [...element.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || element.closest("svg, option, :disabled")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${element.className} ${element.textContent} ${ratio.toFixed(2)}`);
  }
  return faint;
}
"""
WALK = """
() => {
  document.querySelector("[data-step]").click();
  const shown = () => document.querySelector(".status").textContent;
  const found = [];
  for (let before = ""; shown() !== before; ) {
    before = shown();
    found.push([before, document.querySelectorAll(".stage .side > *").length]);
    document.querySelector(".next-step").click();
  }
  return found;
}
"""
IMAGE = """
() => new Promise((done) => {
  const image = new Image();
  image.setAttribute("onerror", "window.harmed = 1");
  image.addEventListener("error", () => done());
  document.body.append(image);
  image.src = "x";
})
"""
OVERLAPS = """
() => {
  const nodes = [...document.querySelectorAll(".side:first-child .tree .node")];
  const boxes = nodes.map((each) => each.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => meet(a, b))).length;
}
"""


def figures(values):
    """Write numbers as the page does."""
    return [figure(value) for value in values]


def figure(value):
    if value is None or value != value:
        return "–"
    few = float(f"{value:.4g}")
    if few and abs(few) < 1e-4:
        digits, _, power = f"{few:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{few:.10f}".rstrip("0").rstrip(".")


@pytest.fixture(scope="module")
def rounds():
    """Rounds of the shipped pair, whose first one accepts drafts off the tree's front."""
    pair = specsim.load()
    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4)
    prompts = ["def count(n):\n    while n", "import os\n"]
    return specsim.trace(pair, prompts, config, SamplingParams(max_new_tokens=24))


@pytest.fixture(scope="module")
def exploration(rounds):
    return specsim.explore(rounds)


def test_steps_lead_through_all_rounds_of_a_request(open_page, exploration, rounds):
    opened = open_page(exploration)
    assert opened.steps() == PHASES
    assert opened.page.is_disabled(".previous-round")
    own = rounds.of(0)
    for place, each in enumerate(own):
        for step, name in enumerate(PHASES):
            assert opened.text(".status").startswith(f"Round {each.index}, step {step + 1} of {len(PHASES)}: ")
            assert opened.values("[aria-current]", "step") == [name]
            if (place, step) != (len(own) - 1, len(PHASES) - 1):
                opened.page.click(".next-step")
    assert opened.page.is_disabled(".next-round")
    opened.page.click(".next-step")  # nothing follows
    assert opened.values("[aria-current]", "step") == ["extend"]
    for _ in PHASES:
        opened.page.click(".previous-step")
    assert opened.text(".status").startswith(f"Round {own[-2].index}, step 8 of 8: ")


def test_the_text_grows_round_by_round(open_page, exploration, rounds):
    opened = open_page(exploration)
    request = rounds.generation.outputs[1]
    prompt = rounds.decode(request.prompt_token_ids)
    opened.page.select_option("select[aria-label=Request]", label="request 1")
    known = 1
    for each in rounds.of(1):
        opened.go("mask")
        assert opened.text(".text") == rounds.decode([*request.prompt_token_ids, *request.token_ids[:known]])
        opened.go("verify")
        known += len(each.accepted_tokens(1))
        assert opened.text(".text") == rounds.decode([*request.prompt_token_ids, *request.token_ids[:known]])
        assert opened.text(".text .prompt") == prompt
        if known <= len(request.token_ids):
            assert visible(opened.text(".text .bonus")) == visible(each.texts(1)[1])
        if each is not rounds.of(1)[-1]:
            opened.page.click(".next-round")


def visible(text):
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


@pytest.mark.parametrize("request_id", [0, 1])
def test_figures_of_drafts_are_those_of_the_trace(open_page, exploration, rounds, request_id):
    opened = open_page(exploration)
    opened.page.select_option("select[aria-label=Request]", label=f"request {request_id}")
    drafts = rounds[0].drafts(request_id)
    for step, name in enumerate(("draft", "draft2", "draft3"), start=1):
        opened.go(name)
        own = drafts[drafts.step == step]
        shown = {int(place) for place in opened.values(".candidate", "candidate")}
        assert shown == set(own.index)
        for place, row in own.iterrows():
            cells = opened.texts(f"[data-candidate='{place}'] > :is(.token, .number)")
            above = drafts.score[row.parent] if row.parent >= 0 else 1.0
            assert cells == [visible(row.text), *figures([row.score / above, row.score])]
            marks = opened.text(f"[data-candidate='{place}'] .marks")
            assert ("●" in marks) == bool(drafts.node.notna()[place])
        if step < 3:
            assert len([mark for mark in opened.texts(".candidate .marks") if "▸" in mark]) == 4


@pytest.mark.parametrize("kind", ["shipped", "rejection", "multi_round", "recursive", "target_only"])
def test_figures_of_nodes_are_those_of_the_trace(open_page, rounds, kind):
    traced = rounds if kind == "shipped" else recorded(kind)
    opened = open_page(specsim.explore(traced))
    request = traced.request_ids[0]
    for each in traced.of(request)[:3]:
        opened.go("verify")
        nodes = each.verify(request)
        assert len(opened.values("button.node", "node")) == len(nodes)
        for node, row in nodes.iterrows():
            opened.page.click(f"button.node[data-node='{node}']")
            facts = dict(zip(opened.texts(".panel dt"), opened.texts(".panel dd"), strict=True))
            own = [row.score, row.draft_prob, row.target_prob, row.uniform]
            expected = dict(
                zip(
                    ("score of the path", "drafter's probability", "target's probability", "uniform"),
                    map(figure, [None if str(value) == "<NA>" else value for value in own]),
                    strict=True,
                )
            )
            expected["position"] = str(int(each.batch.seq_lens[each.request_ids.index(request)]) + row.depth)
            assert facts == {name: value for name, value in expected.items() if value != "–"}
            first = opened.page.query_selector(".panel tbody tr")
            assert first.query_selector(".number").text_content() == figure(target_of(each, request, node))
        accepted = opened.values("button.node.accepted", "node")
        assert sorted(map(int, accepted)) == list(nodes.node[nodes.accepted])
        bonus = each.accepted_tokens(request)[-1]
        assert opened.text(".node.bonus .token") == visible(each.decode([bonus]))
        opened.page.click(".next-round")


def target_of(each, request, node):
    """Largest probability of the target after a node."""
    from specsim.explorer.tables import target_probs

    return float(target_probs(each.states, each.config, each.request_ids.index(request))[node].max())


def test_a_pointed_node_shows_what_it_sees(open_page, exploration, rounds):
    opened = open_page(exploration)
    opened.go("mask")
    mask = rounds[0].verify_input.mask[0]
    for node, line in enumerate(mask.tolist()):
        for target in (f"button.node[data-node='{node}']", f"[data-row='{node}'] rect:last-of-type"):
            opened.page.hover(f"button.node[data-node='{(node + 1) % len(line)}']")
            opened.page.hover(target)
            seen = {int(each) for each in opened.values(":is(.node.seen, .node.pointed)", "node")}
            assert seen == {each for each, sees in enumerate(line) if sees}
            assert opened.text(".panel h5").startswith(f"Node {node} sees {rounds[0].batch.seq_lens[0]} tokens")
    cells = opened.page.eval_on_selector_all(
        ".matrix g",
        "rows => rows.map(row => [...row.querySelectorAll('rect')].map(cell => !cell.classList.contains('none')))",
    )
    assert cells == mask.tolist()


def test_slots_before_and_after_the_commit(open_page, exploration, rounds):
    opened = open_page(exploration)
    moved = 0
    for each in rounds.of(0):
        opened.go("commit")
        count = len(each.accepted_tokens(0))
        row = each.batch.req_pool_indices[0]
        length = int(each.batch.seq_lens[0])
        slots = each.states.committed_pools.req_to_token[row, length : length + count].tolist()
        assert list(map(int, opened.values("[data-phase=commit] .cell.accepted", "slot"))) == slots
        written = opened.values("[data-phase=verify] :is(.cell.accepted, .cell.drafted)", "slot")
        assert list(map(int, written)) == each.verify_input.cache_locations[:8].tolist()
        path = each.verdict.accept_index[0, :count].tolist()
        moves = [
            node for node, slot in zip(path, slots, strict=True) if each.verify_input.cache_locations[node] != slot
        ]
        assert list(map(int, opened.values(".moves li", "move"))) == moves
        assert opened.page.locator(".arrows .arrow").count() == len(moves)
        moved += len(moves)
        opened.go("extend")
        own = each.next_draft_input
        shown = opened.texts("[data-next] .token")
        assert shown == [visible(each.decode([token])) for token in own.topk_index[0].tolist()]
        assert opened.texts("[data-next] .number") == figures(own.topk_scores[0].tolist())
        if each is not rounds.of(0)[-1]:
            opened.page.click(".next-round")
    assert moved > 0


def test_keys_move_through_steps_rounds_and_nodes(open_page, exploration):
    opened = open_page(exploration)
    keyboard = opened.page.keyboard

    def place():
        return opened.page.input_value("select[aria-label=Round]"), *opened.values("[aria-current]", "step")

    for key, expected in (
        ("ArrowRight", ("0", "draft2")),
        ("ArrowLeft", ("0", "draft")),
        ("ArrowLeft", ("0", "draft")),
        ("End", ("0", "extend")),
        ("ArrowRight", ("1", "draft")),
        ("ArrowLeft", ("0", "extend")),
        ("PageDown", ("1", "extend")),
        ("PageUp", ("0", "extend")),
        ("Home", ("0", "draft")),
    ):
        keyboard.press(key)
        assert place() == expected
    opened.go("mask")
    opened.page.focus("button.node[tabindex='0']")
    for key, node in (("ArrowDown", "0"), ("ArrowDown", "1"), ("ArrowUp", "0"), ("ArrowUp", "7")):
        keyboard.press(key)
        assert opened.values(".node.pointed", "node") == [node]
        assert opened.page.evaluate("document.activeElement.dataset.node") == node
        assert opened.text(".panel h5").startswith(f"Node {node} sees ")
    keyboard.press("ArrowRight")
    assert place() == ("0", "verify")
    assert opened.page.evaluate("document.activeElement.dataset.step") == "verify"


def test_tab_reaches_every_control_by_name(open_page, exploration):
    opened = open_page(exploration)
    opened.go("verify")
    opened.page.evaluate("document.activeElement.blur()")
    reached = set()
    names = "each => each && (each.getAttribute('aria-label') || each.textContent.trim())"
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        reached.add(opened.page.evaluate(f"({names})(document.activeElement)"))
    controls = "each => !each.disabled && each.tabIndex >= 0"
    wanted = opened.page.evaluate(
        f"[...document.querySelectorAll('.specsim-explorer :is(button, select)')].filter({controls}).map({names})"
    )
    assert len(wanted) > 10
    assert all(wanted)
    assert set(wanted) <= reached


def test_pictures_have_alternative_text(open_page, exploration):
    opened = open_page(exploration)
    for step in opened.steps():
        opened.go(step)
        pictures = "[...document.querySelectorAll('.stage :is(svg:not([aria-hidden]), [role=img])')]"
        assert opened.page.evaluate(f"{pictures}.every(each => each.getAttribute('aria-label'))")
    opened.go("verify")
    label = opened.page.get_attribute(".tree", "aria-label")
    assert label.startswith("Token tree of 7 drafts below ")
    assert "; accepted: " in label


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_step_fits_its_width_in_readable_colours(open_page, exploration, width, scheme):
    opened = open_page(exploration, width, scheme)
    for step in opened.steps():
        opened.go(step)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.page.evaluate(CONTRAST) == []
        assert opened.page.evaluate(OVERLAPS) == 0
    background = opened.page.evaluate("getComputedStyle(document.querySelector('.specsim-explorer')).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_page_follows_a_new_width(open_page, exploration):
    opened = open_page(exploration, 1280)
    opened.go("verify")
    wide = opened.page.evaluate("document.querySelector('.tree').offsetWidth")
    opened.page.set_viewport_size({"width": 400, "height": 800})
    opened.page.wait_for_selector(".specsim-explorer.narrow")
    assert opened.page.evaluate("document.querySelector('.tree').offsetWidth") < wide
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("name", KINDS)
def test_a_round_of_every_kind_opens(open_page, name):
    rounds = recorded(name)
    opened = open_page(specsim.explore(rounds[:2]))
    for place, request in enumerate(rounds.request_ids):
        opened.page.select_option("select[aria-label=Request]", str(place))
        opened.page.select_option("select[aria-label=Round]", "0")
        seen = opened.page.evaluate(WALK)
        assert len(seen) >= 6 * min(2, len(rounds.of(request)))
        assert all(text.startswith("Round ") and boxes for text, boxes in seen)
        assert "undefined" not in opened.text(".specsim-explorer")
        assert "NaN" not in opened.text(".specsim-explorer")


HOSTILE = (
    "<script>window.harmed = 1</script>",
    "</script><script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed=1'>",
    "\u202egnirts\u2066",
    "a\u0000\ud800b",
    "<!--<script>",
)


def hostile_rounds():
    """Rounds whose tokens have texts that a page must not take for markup."""
    traced = recorded("eagle3")

    def decode(tokens):
        return "".join(HOSTILE[token % len(HOSTILE)] for token in tokens)

    own = tuple(replace(each, decode=decode) for each in traced.rounds)
    return replace(traced, decode=decode, rounds=own)


def test_text_of_models_is_shown_and_never_executed(open_page):
    exploration = specsim.explore(hostile_rounds())
    opened = open_page(exploration)
    for step in opened.steps():
        opened.go(step)
        assert opened.page.evaluate("window.harmed") is None
        assert opened.page.locator("img").count() == 0
        assert opened.page.locator("script").count() == 2
    opened.go("verify")
    shown = opened.text(".specsim-explorer")
    assert "<script>window.harmed" in shown.replace("␣", " ")
    assert "\\u202egnirts\\u2066" in shown
    assert "\u202e" not in shown
    assert exploration.html().count("</script>") == 2


def test_only_the_program_of_the_page_may_run(open_page, exploration):
    opened = open_page(exploration)
    opened.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.harmed = 1'}))"
    )
    opened.page.evaluate(IMAGE)
    assert opened.page.evaluate("window.harmed") is None
    blocked = [complaint for complaint in opened.complaints if "Content Security Policy" in complaint]
    assert any("inline script" in complaint for complaint in blocked)
    assert any("loading the image" in complaint.lower() for complaint in blocked)
    opened.complaints.clear()


def test_a_module_draws_in_any_element(browser, exploration):
    """A notebook imports the module and calls render with a model, and the returned function ends it."""
    from specsim.explorer.explore import PROGRAM, STYLE

    context = browser.new_context()
    page = context.new_page()
    page.route(
        "http://notebook.test/",
        lambda route: route.fulfill(body="<!DOCTYPE html><div id='cell'></div>", content_type="text/html"),
    )
    page.route(
        "http://notebook.test/explorer.js",
        lambda route: route.fulfill(body=PROGRAM.read_text(), content_type="text/javascript"),
    )
    page.goto("http://notebook.test/")
    page.add_style_tag(content=STYLE.read_text())
    page.evaluate(
        """async (exploration) => {
        const module = await import("/explorer.js");
        const model = { get: (name) => ({ exploration })[name] };
        window.end = module.default.render({ model, el: document.getElementById("cell") });
    }""",
        exploration.document,
    )
    assert page.locator("#cell [aria-current]").text_content() == "Draft 1"
    page.evaluate("window.end()")
    context.close()


def test_pages_say_which_rounds_they_hold(open_page):
    rounds = recorded("eagle3")
    opened = open_page(specsim.explore(rounds[1:3]))
    assert opened.texts("select[aria-label=Round] option") == ["round 1", "round 2"]
    assert f"the first 2 of {len(rounds)} rounds" in opened.text(
        ".caption"
    ) or f"2 of {len(rounds)} rounds" in opened.text(".caption")


def test_a_page_is_the_same_each_time(exploration):
    assert page_html(exploration.document, "a title") == page_html(exploration.document, "a title")
