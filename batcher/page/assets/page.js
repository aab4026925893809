"use strict";
// The page: a run, its workers or two runs, with controls and stories; wheel, drag and keys move.

const LEAST_STEPS = 8; // visible at the closest zoom

class Page {
  constructor(place, runs, facts) {
    this.facts = facts;
    this.isPart = facts.is_part; // of a longer document, in which the wheel scrolls
    this.view = new View(runs, () => this.draw());
    this.controls = new Controls(this, this.view);
    this.tip = element("div", { class: "tip", role: "tooltip", hidden: true });
    const label = "Story of the selected request";
    this.panel = element("aside", { class: "panel", "aria-label": label, tabindex: -1 });
    this.stage = element("div", { class: "stage" });
    this.axis = this.stage.appendChild(element("canvas", { class: "axis", "aria-hidden": "true" }));
    this.charts = runs.map((run, number) => {
      const headline = element("small", {}, ` ${visible(run.facts.headline)}`);
      const name = element("bdi", {}, visible(run.name));
      this.stage.append(element("h2", {}, facts.diff ? `${"AB"[number]}: ` : "", name, headline));
      const chart = new Chart(this.view, run, this.stage);
      chart.marked = facts.diff?.step ?? null;
      return chart;
    });
    place.append(
      this.controls.element,
      element("div", { class: "found" }, this.controls.legend, this.controls.status, this.controls.found),
      element("div", { class: "body" }, this.stage, this.panel),
      this.tip,
    );
    this.listen();
    this.select(null);
    this.resize();
    this.open(facts.opening ?? {});
    if (!this.isPart) this.charts[0].canvas.focus();
  }

  open({ steps, requests, slots }) {
    if (requests || slots)
      this.controls.applyFilter({ ids: requests && new Set(requests), slots: slots && new Set(slots) });
    const step = this.facts.diff?.step;
    if (steps) this.showSteps(this.view.runs[0], ...steps);
    else if (step > 200) this.showSteps(this.view.runs[0], step - 60, step + 140);
  }

  listen() {
    const { view, stage } = this;
    const zooms = ({ shiftKey, altKey, ctrlKey, metaKey }) =>
      !shiftKey && !altKey && (!this.isPart || ctrlKey || metaKey);
    this.zoom = d3
      .zoom()
      .filter((event) => (event.type === "wheel" ? zooms(event) : !event.button))
      .clickDistance(4)
      .on("zoom", ({ transform, sourceEvent }) => {
        if (transform.k === view.transform.k && sourceEvent?.type?.endsWith("move"))
          for (const chart of this.charts) chart.scrollRows(this.lastY - transform.y);
        this.lastY = transform.y;
        view.transform = transform;
        view.changed();
      });
    this.area = d3.select(stage).call(this.zoom).on("dblclick.zoom", null);
    stage.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    for (const chart of this.charts) {
      const at = ({ offsetX, offsetY }) => chart.at(offsetX, offsetY);
      chart.canvas.addEventListener("pointermove", (event) => this.point(at(event), event));
      chart.canvas.addEventListener("pointerleave", () => this.point(null));
      chart.canvas.addEventListener("click", (event) => {
        const { span = -1 } = at(event) ?? {};
        if (span < 0) this.select(null);
        else this.select(chart.run, chart.run.spans.sequence[span], span);
        chart.canvas.focus({ preventScroll: true });
      });
      chart.canvas.addEventListener("keydown", (event) => this.onChartKey(chart, event));
    }
    document.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.resize()).observe(stage.closest("main"));
    addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.changed());
    const { dataset } = document.documentElement;
    let before = "";
    const switchTo = (theme) => {
      [before, dataset.theme] = [dataset.theme ?? "", theme];
      this.draw();
    };
    addEventListener("beforeprint", () => switchTo("light")); // as paper is
    addEventListener("afterprint", () => switchTo(before));
  }

  resize() {
    const { view, stage, charts } = this;
    const width = Math.max(200, stage.clientWidth);
    const { k, x } = view.transform;
    const share = (width - GUTTER) / (view.width - GUTTER);
    const moved = GUTTER - k * GUTTER + (x - GUTTER + k * GUTTER) * share;
    view.width = width;
    const { offsetTop, offsetHeight } = this.panel;
    const below = offsetTop > stage.offsetTop ? offsetHeight : 0; // in a narrow window
    const others = charts.reduce((sum, { canvas }) => sum - canvas.offsetHeight, stage.offsetHeight);
    const room = innerHeight - stage.offsetTop - others - below - 12;
    for (const chart of charts) chart.resize(width, room / charts.length);
    const most = Math.max(...view.runs.map((run) => run.numSteps)) / LEAST_STEPS;
    this.zoom
      .extent([[GUTTER, 0], [width, 1]]) // prettier-ignore
      .translateExtent([[GUTTER, -Infinity], [width, Infinity]]) // prettier-ignore
      .scaleExtent([1, Math.max(1, most)]);
    this.zoom.transform(this.area, d3.zoomIdentity.translate(moved, 0).scale(k));
    view.draw(); // now: resizing has cleared the canvas
  }

  zoomBy(factor) {
    this.zoom.scaleBy(this.area, factor, [this.focus() ?? (GUTTER + this.view.width) / 2, 0]);
  }

  /** Returns the start of the selected span in CSS pixels if it is visible. */
  focus() {
    const { selected, x, width } = this.view;
    if (!selected || selected.span === null) return null;
    const at = x(this.view.begin(selected.run, selected.run.spans.start[selected.span]));
    return at > GUTTER && at < width ? at : null;
  }

  /** Shows the steps [start, end) of a run. */
  showSteps(run, start, end) {
    const { view } = this;
    const { base, width } = view;
    const left = base(view.begin(run, Math.max(0, start)));
    const right = base(view.end(run, Math.min(run.numSteps, Math.max(end, start + 1))));
    const k = (width - GUTTER) / Math.max(1e-9, right - left);
    const scale = Math.min(this.zoom.scaleExtent()[1], Math.max(1, k));
    const shift = Math.max(width * (1 - scale), (GUTTER + width - scale * (left + right)) / 2);
    const within = Math.min(GUTTER * (1 - scale), shift);
    this.zoom.transform(this.area, d3.zoomIdentity.translate(within, 0).scale(scale));
  }

  /** Selects a sequence and a span, and shows the story of its leader. */
  select(run, sequence, span = null) {
    const { view } = this;
    view.selected = run && {
      run,
      sequence: run.sequences.leader[sequence],
      span: span ?? run.spansOf(sequence)[0] ?? null,
    };
    this.tell(view.selected);
    view.changed();
  }

  /** Selects a request and shows its spans, or else its wait. */
  choose(run, sequence) {
    this.select(run, sequence);
    const leader = this.view.selected.sequence;
    const spans = run.spansOf(leader);
    const start = spans.length ? run.spans.start[spans[0]] : run.sequences.arrived[leader];
    const end = spans.length ? run.end(spans.at(-1)) : start + 1;
    const margin = Math.max(4, (end - start) / 4);
    this.showSteps(run, Math.floor(start - margin), Math.ceil(end + margin));
    if (spans.length) this.reveal(run, run.spans.slot[spans[0]]);
  }

  reveal(run, slot) {
    const chart = this.charts.find((one) => one.run === run);
    const y = slot * chart.rowHeight - chart.top;
    chart.scrollRows(Math.min(y, Math.max(0, y + chart.rowHeight - chart.rowsHeight)));
  }

  switchScale() {
    const { view } = this;
    const [run] = view.runs;
    if (!view.canBeTimed) return;
    const [from, to] = view.x.domain().map((unit) => view.position(run, unit));
    view.isTimed = !view.isTimed;
    this.controls.scale.textContent = view.isTimed ? "Seconds" : "Steps";
    this.showSteps(run, Math.round(from), Math.round(to));
    view.changed();
  }

  switchTheme() {
    const root = document.documentElement;
    root.dataset.theme = getComputedStyle(root).colorScheme.includes("dark") ? "light" : "dark";
    this.view.changed();
  }

  onWheel(event) {
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.altKey) for (const chart of this.charts) chart.scrollRows(event.deltaY);
    else if (isSideways)
      this.zoom.translateBy(this.area, -(event.deltaX || event.deltaY) / this.view.transform.k, 0);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.view.changed();
  }

  point(pointed, event) {
    const { tip } = this;
    this.view.pointed = pointed;
    tip.hidden = !pointed;
    if (pointed) {
      tip.replaceChildren(...pointedText(pointed).map((line) => element("div", {}, line)));
      const below = event.clientY + 18;
      const isLow = below + tip.offsetHeight > innerHeight;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${isLow ? event.clientY - tip.offsetHeight - 10 : below}px`;
    }
    this.view.changed();
  }

  onChartKey(chart, event) {
    const { run } = chart;
    const { zoom, area, view } = this;
    const page = chart.rowsHeight * 0.8;
    const move = (view.width - GUTTER) / 5 / view.transform.k;
    const actions = {
      ArrowLeft: () => (event.shiftKey ? this.step(run, -1, 0) : zoom.translateBy(area, move, 0)),
      ArrowRight: () => (event.shiftKey ? this.step(run, 1, 0) : zoom.translateBy(area, -move, 0)),
      ArrowUp: () => this.step(run, 0, -1),
      ArrowDown: () => this.step(run, 0, 1),
      Home: () => zoom.translateTo(area, GUTTER, 0, [GUTTER, 0]),
      End: () => zoom.translateTo(area, view.width, 0, [view.width, 0]),
      PageUp: () => chart.scrollRows(-page),
      PageDown: () => chart.scrollRows(page),
      "+": () => this.zoomBy(2),
      "=": () => this.zoomBy(2),
      "-": () => this.zoomBy(1 / 2),
      0: () => zoom.transform(area, d3.zoomIdentity),
      "[": () => this.scaleRows(1 / 1.5),
      "]": () => this.scaleRows(1.5),
      Enter: () => this.panel.focus(),
    };
    this.act(actions[event.key], event);
  }

  onKey(event) {
    if (event.target.matches?.("input, select, textarea") || this.controls.help.open || event.altKey) return;
    const { controls } = this;
    const actions = {
      "/": () => controls.find.focus(),
      f: () => controls.find.focus(),
      n: () => controls.goTo(controls.hit + 1),
      p: () => controls.goTo(controls.hit - 1),
      s: () => this.switchScale(),
      t: () => this.switchTheme(),
      "?": () => controls.help.showModal(),
      Escape: () => this.select(null),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action) this.act(action, event);
    else if (event.target === document.body && !this.isPart) this.onChartKey(this.charts[0], event);
  }

  act(action, event) {
    if (!action || event.ctrlKey || event.metaKey) return;
    action();
    event.preventDefault();
    this.view.changed();
  }

  scaleRows(factor) {
    for (const chart of this.charts) chart.rowScale = Math.min(20, Math.max(0.2, chart.rowScale * factor));
    this.resize();
  }

  /** Selects a neighbour of the selected span in time or slots. */
  step(run, inTime, inSlots) {
    const { view } = this;
    const { spans } = run;
    const chosen = view.selected?.run === run ? view.selected.span : null;
    let span;
    if (chosen === null) {
      const first = Math.floor(view.position(run, view.x.invert(GUTTER)));
      span = run.bySlot[run.ends.findIndex((end) => end > first)];
    } else if (inTime) {
      const at = run.placeAt(spans.slot[chosen], spans.start[chosen]) + inTime;
      if (spans.slot[run.bySlot[at]] === spans.slot[chosen]) span = run.bySlot[at];
    } else {
      let slot = spans.slot[chosen] + inSlots;
      while (slot >= 0 && slot < run.numSlots && run.placeAt(slot, spans.start[chosen]) < 0) slot += inSlots;
      if (slot >= 0 && slot < run.numSlots) span = run.bySlot[run.placeAt(slot, spans.start[chosen])];
    }
    if (span === undefined) return;
    this.select(run, spans.sequence[span], span);
    if (this.focus() === null)
      this.zoom.translateTo(this.area, view.base(view.begin(run, spans.start[span])), 0);
    this.reveal(run, spans.slot[span]);
    const pointed = { run, step: spans.start[span], slot: spans.slot[span], span };
    this.controls.status.textContent = pointedText(pointed).join(", ");
  }

  tell(selected) {
    const goTo = (run) => (start, end) => this.showSteps(run, start - 2, end + 2);
    const told = [];
    const { diff } = this.facts;
    const { runs } = this.view;
    for (const run of selected ? (diff ? runs : [selected.run]) : []) {
      const label = selected.run.sequences.label[selected.sequence];
      const sequence = run === selected.run ? selected.sequence : run.sequences.label.indexOf(label);
      if (diff) told.push(element("h2", {}, `In ${"AB"[runs.indexOf(run)]}`));
      if (sequence < 0) told.push(element("p", {}, "This run has no such request."));
      else told.push(storyOfRequest(run, sequence, goTo(run)));
    }
    const chooseNamed = (label) => {
      const run = runs.find(({ sequences }) => sequences.label.includes(label));
      if (run) this.choose(run, run.sequences.label.indexOf(label));
    };
    if (diff) told.push(differences(diff, goTo(runs[0]), chooseNamed));
    const hint = "Click a request, or select one with ↑ and ↓. Press ? for all keys.";
    if (!told.length) told.push(element("p", { class: "hint" }, hint));
    this.panel.replaceChildren(...told);
    this.panel.scrollTop = 0;
  }

  draw() {
    for (const chart of this.charts) chart.draw();
    const { axis, view } = this;
    const ratio = devicePixelRatio || 1;
    const height = 24; // as in page.css
    axis.width = Math.round(view.width * ratio);
    axis.height = height * ratio;
    const context = axis.getContext("2d");
    const { x } = view;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = context.strokeStyle = colorsOfPage().text;
    context.font = "11px system-ui, sans-serif";
    const format = view.isTimed ? x.tickFormat(view.width / 110) : counted;
    for (const tick of x.ticks(view.width / 110)) {
      if (!view.isTimed && tick % 1) continue;
      const at = x(tick);
      context.fillRect(at, height - 5, 1, 5);
      context.textAlign = at > view.width - 30 ? "right" : "center";
      context.fillText(format(tick), at, height - 9);
    }
    context.textAlign = "left";
    context.fillText(view.isTimed ? "seconds" : "step", 2, height - 9);
  }
}

async function begin() {
  const place = document.getElementById("page");
  place.replaceChildren(element("p", {}, "Reading the run …"));
  try {
    const facts = new TextDecoder().decode(bytesOf(document.getElementById("facts").textContent));
    const runs = [];
    for (const script of document.querySelectorAll("script.run"))
      runs.push(new Run(await unpack(script.textContent)));
    place.replaceChildren();
    globalThis.page = new Page(place, runs, JSON.parse(facts));
    place.dataset.ready = "yes";
  } catch (error) {
    place.replaceChildren(element("p", { role: "alert" }, `This page cannot be shown: ${error.message}`));
    throw error;
  }
}

begin();
