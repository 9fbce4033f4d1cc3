// Page of recorded rounds: render({ model, el }) draws model.get("exploration"), a document specsim/exploration/1.
// Text of models reaches the page through textContent only.

const PHASES = { select: "Select", mask: "Mask", verify: "Verify", commit: "Commit", extend: "Draft-extend" };
const SVG = "http://www.w3.org/2000/svg";

// Elements

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "onchange" || name === "onpoint") listen(made, name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

function listen(element, name, action) {
  const events = name === "onpoint" ? ["pointerenter", "focus", "click"] : [name.slice(2)];
  for (const event of events) element.addEventListener(event, action);
}

function draw(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

// Blanks and characters that are invisible or turn the direction of a line are shown as signs.
function visible(text) {
  const signs = { " ": "␣", "\n": "↵", "\t": "⇥" };
  const shown = text.replace(/[ \n\t]/g, (sign) => signs[sign]);
  return escapeInvisible(shown);
}

function escapeInvisible(text) {
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (sign) => (sign === "\n" ? sign : `\\u${sign.codePointAt(0).toString(16)}`));
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential() : String(value);
}

const bar = (share, kind) => {
  const inner = make("span", { class: `fill ${kind}` });
  inner.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return make("span", { class: "bar", "aria-hidden": "true" }, inner);
};

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// State: the round, the request, the step and the node that is pointed at

class Explorer {
  constructor(exploration, el) {
    this.data = exploration;
    this.el = el;
    this.round = 0;
    this.step = 0;
    this.node = null;
    this.rounds = exploration.rounds.map((round) => round.index);
    this.request = this.data.rounds[0]?.requests[0]?.request ?? 0;
    this.build();
    if (exploration.mismatch) this.open(exploration.mismatch);
    this.show();
  }

  open(mismatch) {
    this.request = mismatch.request ?? this.request;
    const place = this.steps.findIndex((step) => step.key === mismatch.step);
    this.step = Math.max(0, place);
    this.node = this.now && mismatch.node !== null && mismatch.node < this.now.nodes.tokens.length ? mismatch.node : null;
  }

  get now() {
    return this.of(this.data.rounds);
  }

  of(rounds) {
    return rounds[this.round]?.requests.find((each) => each.request === this.request) ?? null;
  }

  get steps() {
    if (!this.now) return [];
    const levels = Math.max(1, ...this.now.candidates.steps);
    const drafts = Array.from({ length: levels }, (_, level) => ({
      key: level ? `draft${level + 1}` : "draft",
      level: level + 1,
      title: levels > 1 ? `Draft ${level + 1}` : "Draft",
    }));
    return [...drafts, ...Object.entries(PHASES).map(([key, title]) => ({ key, title }))];
  }

  get key() {
    return this.steps[this.step]?.key;
  }

  token(id) {
    return visible(this.data.tokens[id] ?? `<${id}>`);
  }

  // Rounds of this request; a request that has ended takes part no more.
  roundsOf(request) {
    return this.data.rounds.flatMap((round, place) => (round.requests.some((each) => each.request === request) ? [place] : []));
  }

  goStep(change) {
    const next = this.step + change;
    if (next < 0 || next >= this.steps.length) {
      if (this.goRound(change)) this.goTo(change > 0 ? 0 : this.steps.length - 1);
      return;
    }
    this.goTo(next);
  }

  goTo(step) {
    this.step = Math.max(0, Math.min(step, this.steps.length - 1));
    this.node = null;
    this.show();
  }

  goRound(change) {
    const own = this.roundsOf(this.request);
    const place = own[own.indexOf(this.round) + change];
    if (place === undefined) return false;
    const title = this.steps[this.step]?.key;
    this.round = place;
    this.keepStep(title);
    return true;
  }

  keepStep(key) {
    const place = this.steps.findIndex((step) => step.key === key);
    this.step = place < 0 ? 0 : place;
    this.node = null;
    this.show();
  }

  setRequest(request) {
    const key = this.key;
    this.request = request;
    const own = this.roundsOf(request);
    if (!own.includes(this.round)) this.round = own.at(-1) ?? 0;
    this.keepStep(key);
  }

  // Frame: drawn once

  build() {
    const { data, el } = this;
    this.caption = make("p", { class: "caption" }, this.describeRun());
    this.text = make("p", { class: "text", tabindex: 0, role: "region", "aria-label": "Text of the request" });
    this.requestBox = make(
      "select",
      { "aria-label": "Request", onchange: (event) => this.setRequest(Number(event.target.value)) },
      data.requests.map((each, place) => make("option", { value: place }, `request ${each.id}`)),
    );
    this.roundBox = make("select", {
      "aria-label": "Round",
      onchange: (event) => {
        const key = this.key;
        this.round = Number(event.target.value);
        this.keepStep(key);
      },
    });
    const button = (label, sign, action, name) => make("button", { type: "button", "aria-label": label, title: label, class: name, onclick: action }, sign);
    this.nav = make("ol", { class: "steps", "aria-label": "Steps of the round" });
    this.status = make("p", { class: "status", "aria-live": "polite" });
    this.stage = make("div", { class: "stage" });
    const rounds = make(
      "div",
      { class: "controls" },
      button("Previous round", "«", () => this.goRound(-1), "previous-round"),
      this.roundBox,
      button("Next round", "»", () => this.goRound(1), "next-round"),
      data.requests.length > 1 ? this.requestBox : null,
      make(
        "span",
        { class: "walk" },
        button("Previous step", "‹ step", () => this.goStep(-1), "previous-step"),
        button("Next step", "step ›", () => this.goStep(1), "next-step"),
      ),
    );
    const keys = make("p", { class: "keys" }, "Keys: ← → step, PageUp and PageDown round, ↑ ↓ node, Home and End first and last step.");
    this.root = make(
      "section",
      { class: "specsim-explorer", "aria-label": "Explorer of speculative decoding rounds", tabindex: -1 },
      this.caption, this.mismatch(), this.text, rounds, this.nav, this.status, this.stage, keys,
    );
    this.root.addEventListener("keydown", (event) => this.onKey(event));
    el.replaceChildren(this.root);
  }

  describeRun() {
    const { config, num_rounds: total } = this.data;
    const setting = config.num_steps === 0 ? "no drafts" : `topk ${config.topk}, num_steps ${config.num_steps}, num_draft_tokens ${config.num_draft_tokens}`;
    const kept = this.data.rounds.length < total ? ` · ${this.data.rounds.length} of ${total} rounds` : "";
    return `${this.data.pair} · drafter ${this.data.drafter} · ${setting} · verifier ${this.data.verifier} · ${this.data.impl}${kept}`;
  }

  mismatch() {
    const found = this.data.mismatch;
    if (!found) return null;
    const entry = found.entry === null ? "" : `, entry ${found.entry}`;
    const request = found.request === null ? "" : `, request ${found.request}`;
    return make(
      "div",
      { class: "mismatch", role: "note" },
      make("strong", {}, `First difference: ${found.field}${entry}`),
      make("span", {}, ` (${found.round ? `round ${found.round - 1}, ` : ""}${found.phase}${request}) `),
      make("span", { class: "reference" }, `reference: ${escapeInvisible(found.reference)}`),
      make("span", { class: "other" }, `${found.impl}: ${escapeInvisible(found.other)}`),
      make("span", { class: "cell" }, found.cell),
      found.note ? make("span", {}, found.note) : null,
    );
  }

  onKey(event) {
    if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
    const moves = {
      ArrowRight: () => this.goStep(1),
      ArrowLeft: () => this.goStep(-1),
      PageDown: () => this.goRound(1),
      PageUp: () => this.goRound(-1),
      Home: () => this.goTo(0),
      End: () => this.goTo(this.steps.length - 1),
      ArrowDown: () => this.focusNode(1),
      ArrowUp: () => this.focusNode(-1),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    moves[event.key]();
  }

  focusNode(change) {
    const nodes = [...this.stage.querySelectorAll("button.node[data-node]")];
    if (!nodes.length) return;
    const at = nodes.indexOf(this.stage.querySelector("button.node.pointed"));
    const next = nodes[(at + change + nodes.length) % nodes.length];
    next.focus();
  }

  // One step: drawn after every move

  show() {
    const width = this.el.clientWidth;
    for (const [name, isSo] of [["narrow", width < 480], ["wide", width >= 680], ["wider", width >= 900]]) this.root.classList.toggle(name, isSo);
    const focused = this.root.getRootNode().activeElement;
    const hadFocus = this.stage.contains(focused) || this.nav.contains(focused);
    this.roundBox.replaceChildren(...this.roundsOf(this.request).map((place) => make("option", { value: place }, `round ${this.rounds[place]}`)));
    this.roundBox.value = String(this.round);
    this.requestBox.value = String(this.request);
    this.nav.replaceChildren(...this.steps.map((step, place) => make("li", {}, this.stepButton(step, place))));
    const own = this.roundsOf(this.request);
    this.setDisabled("previous-round", own.indexOf(this.round) <= 0);
    this.setDisabled("next-round", own.indexOf(this.round) >= own.length - 1);
    this.showText();
    if (!this.now) {
      this.status.textContent = "No round was recorded.";
      return;
    }
    const sides = this.data.other?.length ? [["reference", "rounds"], [this.data.mismatch.impl, "other"]] : [["", "rounds"]];
    const step = this.steps[this.step];
    this.stage.replaceChildren(...sides.map(([name, source]) => this.side(name, source, step)));
    this.stage.classList.toggle("both", sides.length > 1);
    this.status.textContent = `Round ${this.rounds[this.round]}, step ${this.step + 1} of ${this.steps.length}: ${this.says(step)}`;
    this.point(this.node ?? this.startNode(step.key), false);
    this.drawMoves();
    if (!hadFocus) return;
    const again = focused.dataset.node !== undefined && this.node !== null ? this.stage.querySelector(".node.pointed") : null;
    (again ?? this.nav.querySelector("[aria-current]"))?.focus({ preventScroll: true });
  }

  setDisabled(name, isDisabled) {
    this.root.querySelector(`.${name}`).disabled = isDisabled;
  }

  stepButton(step, place) {
    const isNow = place === this.step;
    return make("button", { type: "button", "aria-current": isNow ? "step" : null, "data-step": step.key, onclick: () => this.goTo(place) }, step.title);
  }

  side(name, source, step) {
    const recorded = this.of(this.data[source]);
    const body = !recorded
      ? [make("p", { class: "hint" }, "This implementation recorded nothing here.")]
      : step.level ? this.draft(recorded, step.level) : this[step.key](recorded);
    return make("div", { class: "side", "data-source": source }, name ? make("h4", {}, name) : null, body);
  }

  startNode(key) {
    const { path, nodes } = this.now;
    if (key === "mask") return nodes.tokens.length - 1;
    return key === "verify" || key === "select" ? path.at(-1) : null;
  }

  says(step) {
    const { now } = this;
    const count = now.path.length - 1;
    const drafts = now.nodes.tokens.length - 1;
    if (step.level) return this.saysDraft(now, step.level);
    return {
      select: `the ${plural(drafts, "draft")} with the highest scores of ${plural(now.candidates.tokens.length, "candidate")} join the root in the tree${now.dead ? `; ${plural(now.dead, "node")} of the tree stay${now.dead === 1 ? "s" : ""} dead` : ""}.`,
      mask: "the target reads all nodes in one forward pass; each sees the prefix, its ancestors and itself. Point at a node.",
      verify: `${now.decided_by} accepts ${plural(count, "draft")}; the bonus token ${now.bonus_origin}.`,
      commit: `the KV of the ${plural(count + 1, "accepted node")}, root included, goes to columns ${now.length} to ${now.length + count}.`,
      extend: now.extend.next.length
        ? `the drafter reads the target's features of ${plural(now.extend.count, "accepted token")} and makes the first drafts of the next round.`
        : "this drafter reads tokens only, so nothing is left for the next round but its root, the bonus token.",
    }[step.key];
  }

  saysDraft(now, level) {
    const { topk } = this.data.config;
    const first = this.round === 0 ? "the prefill" : "draft-extend of the round before";
    const verb = this.data.config.verifier === "target_only" || this.data.config.verifier === "typical" ? "proposes its best tokens" : "draws a token";
    if (!now.candidates.tokens.length) return "nothing is proposed; the target makes one token from the root.";
    if (now.draft_kind === "lookup") return `the drafter looks tokens up in the text so far, without a model: drafts of depth ${level}.`;
    if (now.draft_kind === "block") return `slot ${level} of the block made these drafts; all slots come from one forward over the bonus token and mask tokens.`;
    if (now.draft_kind === "masks") return `row ${level} of the one forward in ${first} made these drafts${level > 1 ? ", from a mask token" : ""}.`;
    if (now.draft_kind === "modules") return `module ${level} made these drafts in ${first}.`;
    if (level === 1) return `${first} left ${plural(topk, "first draft")}, children of the root.`;
    const lanes = topk === 1 ? "one lane, which" : `${topk} lanes; each`;
    return `forward ${level - 1} of the drafter runs ${lanes} ${verb}${now.lanes[level - 1] && topk > 1 && verb.startsWith("proposes") ? `, and the ${topk} best paths go on` : ""}.`;
  }

  showText() {
    const { now } = this;
    const request = this.data.requests[this.request];
    if (!request) return;
    const prompt = request.prompt.length > 400 ? `…${request.prompt.slice(-400)}` : request.prompt;
    const parts = [make("bdi", { class: "prompt" }, escapeInvisible(prompt))];
    const known = now ? now.length + 1 - request.prompt_len : 0;
    const isVerified = ["verify", "commit", "extend"].includes(this.key);
    const shown = now && isVerified ? known + now.path.length : known;
    request.pieces.slice(0, shown).forEach((piece, place) => {
      const isNew = place >= known;
      const isBonus = isNew && place === shown - 1;
      parts.push(make("bdi", { class: isBonus ? "bonus" : isNew ? "accepted" : place === known - 1 ? "root" : "output" }, escapeInvisible(piece)));
    });
    this.text.replaceChildren(...parts);
    this.text.scrollTop = this.text.scrollHeight;
  }

  // Draft: the candidates of one level, a card for each parent

  draft(recorded, level) {
    const { candidates, lanes } = recorded;
    const places = candidates.steps.flatMap((step, place) => (step === level ? [place] : []));
    const parents = [...new Set(places.map((place) => candidates.parents[place]))];
    const best = Math.max(...places.map((place) => this.share(candidates.scores[place])), 1e-30);
    const going = lanes[level - 1] ?? [];
    const cards = parents.map((parent) => {
      const rank = (lanes[level - 2] ?? []).indexOf(parent);
      const rows = places.filter((place) => candidates.parents[place] === parent).map((place) => this.candidate(recorded, place, best, going.indexOf(place)));
      const before = parent < 0 ? [recorded.nodes.tokens[0]] : this.candidatePath(candidates, parent);
      const name = `${rank >= 0 ? `lane ${rank}, ` : ""}after`;
      return make("div", { class: "card", role: "group" }, make("h5", {}, `${name} `, make("bdi", {}, before.map((id) => this.token(id)).join(" "))), rows);
    });
    const explicit = ["lookup", "block"].includes(recorded.draft_kind) ? "score: the drafter's, for the path" : "first number: the drafter's probability of the token; second: score of the path";
    const pages = recorded.kv.lanes.length ? this.pages(recorded, "draft", level) : null;
    const legend = make("p", { class: "hint" }, "In a cell: the logical column, and below it lane.step. Dashed: a copy of the prefix's tail.");
    const kv = pages ? [make("h5", { class: "part" }, "KV of the draft lanes"), pages, this.saysPages(recorded, Number(pages.dataset.pages)), legend] : [];
    return [make("div", { class: "cards" }, cards), places.length ? make("p", { class: "hint" }, `${explicit}. ${going.length ? "▸ goes on as a lane. " : ""}● becomes a node of the tree.`) : null, ...kv];
  }

  // Share of a bar: a probability, or the exponential of its logarithm
  share(score) {
    return this.data.config.score === "logprob" ? Math.exp(score) : score;
  }

  candidatePath(candidates, place) {
    const path = [];
    for (let at = place; at >= 0; at = candidates.parents[at]) path.unshift(candidates.tokens[at]);
    return path;
  }

  candidate(recorded, place, best, lane) {
    const { candidates } = recorded;
    const node = candidates.nodes[place];
    const marks = `${lane >= 0 ? "▸" : ""}${node >= 0 ? "●" : ""}`;
    const says = `${lane >= 0 ? `goes on as lane ${lane}. ` : ""}${node >= 0 ? `node ${node} of the tree` : "not in the tree"}`;
    const prob = candidates.probs[place];
    return make(
      "div",
      { class: `candidate ${node >= 0 ? "chosen" : "left"} ${lane >= 0 ? "going" : ""}`, "data-candidate": place, title: says },
      make("bdi", { class: "token" }, this.token(candidates.tokens[place])),
      bar(this.share(candidates.scores[place]) / best, "drafter"),
      make("span", { class: "number" }, prob === undefined ? "" : figure(prob)),
      make("span", { class: "number score" }, figure(candidates.scores[place])),
      make("span", { class: "marks", role: "img", "aria-label": says }, marks),
    );
  }

  // Selection: all candidates by score, and the tree

  select(recorded) {
    const { candidates } = recorded;
    const order = candidates.tokens.map((_, place) => place);
    const isTied = recorded.draft_kind === "lookup";
    if (!isTied) order.sort((a, b) => candidates.scores[b] - candidates.scores[a] || a - b);
    const chosen = order.filter((place) => candidates.nodes[place] >= 0);
    const left = order.filter((place) => candidates.nodes[place] < 0);
    const best = Math.max(...candidates.scores.map((score) => this.share(score)), 1e-30);
    const rows = (places) => places.map((place) => this.candidate(recorded, place, best, -1));
    const list = make(
      "div",
      { class: "card ranking" },
      make("h5", {}, "selected"),
      rows(chosen),
      left.length ? make("h5", {}, "not selected") : null,
      rows(left.slice(0, 8)),
      left.length > 8 ? make("p", { class: "hint" }, `and ${left.length - 8} more with lower scores`) : null,
    );
    return [this.panel(), make("div", { class: "halves" }, this.tree(recorded, false), candidates.tokens.length ? list : null)];
  }

  // Tree: buttons for nodes over lines for edges

  tree(recorded, isVerified) {
    const { nodes, path, bonus } = recorded;
    const parents = [...nodes.parents];
    const depths = [...nodes.depths];
    const count = parents.length;
    if (isVerified) {
      parents.push(path.at(-1));
      depths.push(depths[path.at(-1)] + 1);
    }
    const rows = placeRows(parents);
    const levels = Math.max(...depths) + 1;
    const width = Math.max(46, Math.min(132, Math.floor(this.room() / levels) - 14));
    const pitch = 34;
    const lines = draw("svg", { class: "edges", width: levels * (width + 14), height: (Math.max(...rows) + 1) * pitch, "aria-hidden": "true" });
    const box = make("div", { class: "tree", role: "group", "aria-label": this.describeTree(recorded, isVerified) }, lines);
    box.style.height = `${(Math.max(...rows) + 1) * pitch}px`;
    box.style.width = `${levels * (width + 14)}px`;
    const onPath = (node) => isVerified && (path.includes(node) || node === count);
    parents.forEach((parent, node) => {
      const x = depths[node] * (width + 14);
      const y = rows[node] * pitch;
      if (parent >= 0) {
        const startX = depths[parent] * (width + 14) + width;
        const startY = rows[parent] * pitch + 14;
        const bend = `M${startX} ${startY} C${startX + 8} ${startY} ${x - 8} ${y + 14} ${x} ${y + 14}`;
        lines.append(draw("path", { d: bend, class: onPath(node) && onPath(parent) ? "edge accepted" : "edge" }));
      }
      const button = node === count ? this.bonusBox(recorded, bonus) : this.nodeButton(recorded, node, isVerified);
      button.style.left = `${x}px`;
      button.style.top = `${y}px`;
      button.style.width = `${width}px`;
      button.classList.toggle("small", width < 84);
      box.append(button);
    });
    return make("div", { class: "scroll" }, box);
  }

  room() {
    const width = this.stage.clientWidth || 600;
    const isWide = this.root.classList.contains("wide");
    const sides = this.data.other?.length && isWide ? 2 : 1;
    const isHalf = this.key === "verify" ? this.root.classList.contains("wider") : isWide && ["select", "mask"].includes(this.key);
    const half = isHalf && sides === 1 ? 0.58 : 1;
    return (width / sides) * half - 16;
  }

  nodeButton(recorded, node, isVerified) {
    const { nodes, path, decisions } = recorded;
    const tried = isVerified && decisions.find(([each]) => each === node);
    const state = !isVerified ? "plain" : path.includes(node) ? "accepted" : tried && !tried[1] ? "rejected" : "plain";
    const sign = { accepted: node ? "✓" : "", rejected: "✕", plain: "" }[state];
    const differs = this.differs(node) ? "≠" : "";
    const role = node ? `node ${node}` : "root";
    return make(
      "button",
      { type: "button", class: `node ${state}${differs ? " differs" : ""}`, "data-node": node, tabindex: node ? -1 : 0, "aria-label": `${role}, ${this.token(nodes.tokens[node])}, ${state}`, onpoint: () => this.point(node, true) },
      make("span", { class: "index" }, `${differs}${node}`),
      make("bdi", { class: "token" }, this.token(nodes.tokens[node])),
      make("span", { class: "sign" }, sign),
    );
  }

  bonusBox(recorded, bonus) {
    const other = this.data.other && this.of(this.data.other);
    const differs = other && other.bonus !== this.now.bonus;
    return make("div", { class: differs ? "node bonus differs" : "node bonus", title: "bonus token", role: "note", "aria-label": `bonus token, ${this.token(bonus)}` }, make("span", { class: "index" }, differs ? "≠+" : "+"), make("bdi", { class: "token" }, this.token(bonus)));
  }

  describeTree(recorded, isVerified) {
    const drafts = recorded.nodes.tokens.length - 1;
    const accepted = recorded.path.slice(1).map((node) => this.token(recorded.nodes.tokens[node])).join(" ");
    const verdict = isVerified ? `; accepted: ${accepted || "none"}; bonus token: ${this.token(recorded.bonus)}` : "";
    return `Token tree of ${plural(drafts, "draft")} below ${this.token(recorded.nodes.tokens[0])}${verdict}`;
  }

  differs(node) {
    const other = this.data.other && this.of(this.data.other);
    if (!other) return false;
    const names = ["tokens", "parents", "slots"];
    const inPath = (each) => each.path.indexOf(node);
    return names.some((name) => other.nodes[name][node] !== this.now.nodes[name][node]) || (this.key === "verify" && inPath(other) !== inPath(this.now));
  }

  // Mask

  mask(recorded) {
    const count = recorded.nodes.tokens.length;
    const size = Math.max(5, Math.min(22, Math.floor((this.room() * (this.root.classList.contains("wide") ? 0.6 : 0.92)) / (count + 1))));
    const grid = draw("svg", { class: size < 9 ? "matrix fine" : "matrix", width: (count + 1) * size, height: (count + 1) * size, role: "img", "aria-label": `Attention mask: for each of ${plural(count, "node")}, the nodes that it sees` });
    for (let row = 0; row < count; row += 1) {
      if (size >= 11) {
        grid.append(draw("text", { x: size / 2, y: (row + 1.7) * size, class: "tick" }, String(row)), draw("text", { x: (row + 1.5) * size, y: size * 0.7, class: "tick" }, String(row)));
      }
      const line = draw("g", { "data-row": row });
      for (let column = 0; column < count; column += 1) {
        const sees = recorded.sees[row].includes(column);
        const kind = !sees ? "none" : row === column ? "itself" : "ancestor";
        line.append(draw("rect", { x: (column + 1) * size, y: (row + 1) * size, width: size - 1, height: size - 1, class: kind }));
        if (kind === "itself" && size >= 9) line.append(draw("circle", { cx: (column + 1.5) * size - 0.5, cy: (row + 1.5) * size - 0.5, r: size / 6, class: "dot" }));
      }
      line.addEventListener("pointerenter", () => this.point(row, true));
      grid.append(line);
    }
    const legend = make("p", { class: "hint" }, "row: the node that reads; column: the node that it sees. Filled: an ancestor. Dot: itself. Every node also sees the whole prefix.");
    return [this.panel(), make("div", { class: "halves" }, this.tree(recorded, false), make("div", { class: "scroll" }, grid)), legend];
  }

  // Verify

  verify(recorded) {
    const { decisions, nodes } = recorded;
    const rows = decisions.map(([node, passes, reason]) =>
      make("li", { class: passes ? "passes" : "fails", "data-decision": node }, make("strong", {}, `${passes ? "✓" : "✕"} node ${node} `), make("bdi", { class: "token" }, this.token(nodes.tokens[node])), ` ${reason}`),
    );
    const none = make("p", { class: "hint" }, nodes.tokens.length > 1 ? `${recorded.decided_by} decided; its comparisons are not recorded.` : "There was no draft to verify.");
    const rule = { block: " The longest prefix that passes is accepted.", typical: " The deepest node that passes is accepted, of several the most probable." }[recorded.decided_by] ?? "";
    const list = make("div", { class: "decisions" }, make("h5", {}, `Decisions (${recorded.decided_by}).${rule}`), rows.length ? make("ol", {}, rows) : none);
    return [make("div", { class: "verified" }, this.tree(recorded, true), this.panel(), list)];
  }

  panel() {
    return make("div", { class: "panel", "aria-live": "polite" });
  }

  // Panels of the node that is pointed at, one for each side

  point(node, isKept) {
    if (isKept) this.node = node;
    const { key } = this;
    for (const side of this.stage.querySelectorAll(".side")) {
      const recorded = this.of(this.data[side.dataset.source]);
      const panel = side.querySelector(".panel");
      const isKnown = recorded && node !== null && node < recorded.nodes.tokens.length;
      side.querySelectorAll(".node").forEach((each) => {
        const own = each.dataset.node === undefined ? -1 : Number(each.dataset.node);
        each.classList.toggle("pointed", own === node);
        each.classList.toggle("seen", key === "mask" && isKnown && own >= 0 && own !== node && recorded.sees[node].includes(own));
        if (own >= 0) each.tabIndex = own === (node ?? 0) ? 0 : -1;
      });
      side.querySelectorAll("[data-row]").forEach((each) => each.classList.toggle("pointed", Number(each.dataset.row) === node));
      if (panel) panel.replaceChildren(...(!isKnown ? [] : key === "mask" ? this.seesPanel(recorded, node) : this.nodePanel(recorded, node)));
    }
  }

  seesPanel(now, node) {
    const seen = now.sees[node].map((each) => this.token(now.nodes.tokens[each]));
    return [
      make("h5", {}, `Node ${node} sees ${plural(now.length, "token")} of the prefix and nodes ${now.sees[node].join(", ")}`),
      make("p", {}, make("bdi", { class: "token" }, seen.join(" "))),
    ];
  }

  nodePanel(now, node) {
    const { nodes } = now;
    const facts = [
      ["position", now.length + nodes.depths[node]],
      ["score of the path", figure(nodes.scores[node])],
      ["drafter's probability", figure(nodes.draft_probs[node])],
      ["target's probability", figure(nodes.target_probs[node])],
      ["uniform", figure(nodes.uniforms[node])],
    ].filter(([, value]) => value !== "–");
    const title = make("h5", {}, node ? `Node ${node} ` : "Root ", make("bdi", { class: "token" }, this.token(nodes.tokens[node])));
    const list = make("dl", {}, facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", { "data-fact": name }, String(value)))));
    if (this.key !== "verify") return [title, list];
    const rows = now.after[node].map(([token, target, drafter, child]) =>
      make(
        "tr",
        { "data-token": token, class: child >= 0 && now.path.includes(child) ? "accepted" : "" },
        make("th", { scope: "row" }, make("bdi", { class: "token" }, this.token(token))),
        make("td", {}, bar(target, "target"), make("span", { class: "number" }, figure(target))),
        make("td", {}, drafter === null ? "" : bar(drafter, "drafter"), make("span", { class: "number" }, figure(drafter))),
        make("td", { class: "child" }, child >= 0 ? `node ${child}` : token === now.bonus && node === now.path.at(-1) ? "bonus" : ""),
      ),
    );
    const head = make("tr", {}, ["token after it", "target", "drafter", ""].map((name) => make("th", { scope: "col" }, name)));
    return [title, list, make("table", {}, make("thead", {}, head), make("tbody", {}, rows))];
  }

  // KV slots, page by page

  pages(recorded, phase, level = 0, fewest = 0) {
    const { kv, length, path, nodes } = recorded;
    const size = this.data.config.page_size;
    const start = kv.first_page * size;
    const ids = phase === "commit" ? kv.committed_pages : kv.drafted_pages;
    const content = new Map();
    for (let column = start; column < length; column += 1) content.set(column, ["prefix", ""]);
    if (phase === "draft") {
      kv.tails.forEach((columns, lane) => columns.forEach((column) => content.set(column, ["tail", `${lane + 2}`])));
      kv.lanes.forEach((columns, lane) => columns.slice(0, level - 1).forEach((column, step) => content.set(column, ["lane", `${lane + 1}.${step + 1}`])));
    } else if (phase === "verify") {
      nodes.tokens.forEach((_, node) => nodes.slots[node] >= 0 && content.set(length + node, [path.includes(node) ? "accepted" : "drafted", `${node}`]));
    } else {
      path.forEach((node, depth) => content.set(length + depth, ["accepted", `${node}`]));
    }
    const last = Math.max(-1, ...content.keys());
    const shown = ids.slice(0, Math.max(fewest, Math.floor(last / size) - kv.first_page + 1));
    const blocks = shown.map((page, place) => this.page(page, (kv.first_page + place) * size, content));
    const lost = phase === "draft" && ids.length * size + start <= last ? make("p", { class: "hint" }, "The pages of lanes that are not shown were released before verify.") : null;
    return make("div", { class: "pages", "data-phase": phase, "data-pages": blocks.length }, blocks, lost);
  }

  // Pages that are not drawn
  saysPages(recorded, count) {
    const { first_page: first, drafted_pages: ids } = recorded.kv;
    const before = first ? [`${plural(first, "full page")} of the prefix before these: columns 0 to ${first * this.data.config.page_size - 1}.`] : [];
    const rest = ids.length - count;
    return make("p", { class: "hint" }, [...before, ...(rest > 0 ? [`${plural(rest, "reserved page")} after them.`] : [])].join(" "));
  }

  page(page, firstColumn, content) {
    const size = this.data.config.page_size;
    const cells = Array.from({ length: size }, (_, offset) => {
      const [kind, label] = content.get(firstColumn + offset) ?? ["spare", ""];
      const slot = page * size + offset;
      const says = `slot ${slot}, column ${firstColumn + offset}: ${kind}${label ? ` ${label}` : ""}`;
      return make("span", { class: `cell ${kind}`, "data-slot": slot, title: says, role: "img", "aria-label": says }, make("small", {}, String(firstColumn + offset)), make("b", {}, label));
    });
    const slots = size === 1 ? `slot ${page}` : `page ${page}: slots ${page * size} to ${page * size + size - 1}`;
    return make("div", { class: `page ${size === 1 ? "single" : ""}` }, make("h6", {}, slots), make("div", { class: "cells" }, cells));
  }

  commit(recorded) {
    const { moves } = recorded.kv;
    const moved = moves.filter(([, from, to]) => from !== to);
    const list = moved.map(([node, from, to]) => make("li", { "data-move": node }, `node ${node}: slot ${from} → slot ${to}`));
    const before = this.pages(recorded, "verify");
    const count = Number(before.dataset.pages);
    return [
      make("div", { class: "kv" }, make("h5", {}, "Verify wrote"), before, make("h5", {}, "After the commit"), this.pages(recorded, "commit", 0, count)),
      moved.length ? make("ul", { class: "moves" }, list) : make("p", { class: "hint" }, "The accepted nodes stand in order already: no KV moves."),
      this.saysPages(recorded, count),
      make("p", { class: "hint" }, "In a cell: the logical column, and below it the node of the tree. Blue: prefix. Green, thick: accepted. White: other nodes. Grey: reserved."),
    ];
  }

  // Arrows from where verify wrote a node to where the commit puts it
  drawMoves() {
    for (const kv of this.stage.querySelectorAll(".kv")) {
      kv.querySelector("svg.arrows")?.remove();
      const recorded = this.of(this.data[kv.closest(".side").dataset.source]);
      const frame = kv.getBoundingClientRect();
      const lines = draw("svg", { class: "arrows", width: frame.width, height: frame.height, "aria-hidden": "true" });
      for (const [, from, to] of recorded.kv.moves.filter((move) => move[1] !== move[2])) {
        const start = kv.querySelector(`[data-phase="verify"] [data-slot="${from}"]`)?.getBoundingClientRect();
        const end = kv.querySelector(`[data-phase="commit"] [data-slot="${to}"]`)?.getBoundingClientRect();
        if (!start || !end) continue;
        const [x1, y1] = [start.x + start.width / 2 - frame.x, start.bottom - frame.y];
        const [x2, y2] = [end.x + end.width / 2 - frame.x, end.y - frame.y];
        lines.append(draw("path", { d: `M${x1} ${y1} C${x1} ${y1 + 24} ${x2} ${y2 - 24} ${x2} ${y2 - 5}`, class: "arrow" }), draw("path", { d: `M${x2 - 4} ${y2 - 6} L${x2} ${y2} L${x2 + 4} ${y2 - 6} Z`, class: "head" }));
      }
      kv.append(lines);
    }
  }

  // Draft-extend

  extend(recorded) {
    const { extend, path } = recorded;
    const rows = extend.tokens.map((token, row) => {
      const isUsed = row < extend.count;
      return make(
        "tr",
        { class: isUsed ? "" : "padding", "data-extend": row },
        make("td", {}, isUsed ? `node ${path[row]}` : "padding"),
        make("td", {}, isUsed ? make("bdi", { class: "token" }, this.token(token)) : ""),
        make("td", {}, String(extend.positions[row])),
        make("td", {}, String(extend.slots[row])),
      );
    });
    const head = make("tr", {}, ["features of", "token after it", "position", "slot"].map((name) => make("th", { scope: "col" }, name)));
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, rows));
    if (!extend.next.length) return [make("p", { class: "hint" }, "No draft-extend runs: the drafter keeps no state between rounds but the tokens.")];
    const best = (level) => Math.max(...level.scores.map((score) => this.share(score)), 1e-30);
    const cards = extend.next.map((level, depth) =>
      make(
        "div",
        { class: "card" },
        make("h5", {}, extend.next.length > 1 ? `drafts of depth ${depth + 1}` : "first drafts of the next round"),
        level.tokens.map((token, place) =>
          make("div", { class: "candidate", "data-next": place }, make("bdi", { class: "token" }, this.token(token)), bar(this.share(level.scores[place]) / best(level), "drafter"), make("span", { class: "number" }, figure(level.scores[place]))),
        ),
      ),
    );
    return [make("div", { class: "halves" }, make("div", { class: "scroll" }, table), make("div", { class: "cards" }, cards))];
  }
}

// Leaves in walk order; a parent stands midway between its first and last child.
function placeRows(parents) {
  const children = parents.map((_, node) => parents.flatMap((parent, child) => (parent === node && child !== node ? [child] : [])));
  const rows = parents.map(() => 0);
  let leaves = 0;
  const walk = (node) => {
    children[node].forEach(walk);
    const own = children[node];
    rows[node] = own.length ? (rows[own[0]] + rows[own.at(-1)]) / 2 : leaves++;
  };
  walk(0);
  return rows;
}

function render({ model, el }) {
  const explorer = new Explorer(model.get("exploration"), el);
  let width = el.clientWidth; // 0 where a notebook attaches the element later
  const observer = new ResizeObserver(() => {
    if (el.clientWidth === width) return;
    width = el.clientWidth;
    explorer.show();
  });
  observer.observe(el);
  return () => observer.disconnect();
}

export default { render };
