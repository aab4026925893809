"use strict";
// The page: puts a run, its workers or two runs in step, with controls and stories where the document wants them,
// and moves in time by wheel, drag, pinch and keys.

const LEAST_STEPS = 8; // that are seen at the closest

class Page {
  constructor(place, runs, facts) {
    this.words = facts.words;
    this.facts = facts;
    this.place = place;
    this.isPart = facts.is_part; // of a longer document, which has the wheel to scroll
    this.view = new View(runs);
    this.controls = new Controls(this, this.view);
    this.tip = element("div", { class: "tip", role: "tooltip", hidden: true });
    this.panel = element("aside", {
      class: "panel",
      "aria-label": "Story of the chosen request",
      tabindex: -1,
    });
    this.stage = element("div", { class: "stage" });
    this.axis = this.stage.appendChild(element("canvas", { class: "axis", "aria-hidden": "true" }));
    this.charts = runs.map((run, number) => {
      this.stage.append(
        element(
          "h2",
          {},
          ...(facts.diff ? [`${"AB"[number]}: `] : []),
          element("bdi", {}, visible(run.name)),
          element("small", {}, ` ${headline(run)}`),
        ),
      );
      const chart = new Chart(this.view, run, this.stage);
      chart.marked = facts.diff?.step ?? null;
      return chart;
    });
    place.append(
      this.controls.element,
      element("div", { class: "found" }, this.controls.status, this.controls.found),
      element("div", { class: "body" }, this.stage, this.panel),
      this.tip,
    );
    this.view.watchers.push(() => this.draw());
    this.view.onSelect = (selected) => this.tell(selected);
    this.listen();
    this.tell(null);
    this.resize();
    this.open(facts.opening ?? {});
    if (!this.isPart) this.charts[0].canvas.focus(); // its keys are heard from the beginning
  }

  /** Shows what the command line asked for. */
  open({ steps, requests, slots }) {
    if (requests || slots)
      this.controls.applyFilter({
        ids: requests ? new Set(requests) : null,
        slots: slots ? new Set(slots) : null,
      });
    if (steps) this.showSteps(this.view.runs[0], ...steps);
    else if (this.facts.diff?.step > 200)
      this.showSteps(this.view.runs[0], this.facts.diff.step - 60, this.facts.diff.step + 140);
  }

  listen() {
    const { view, stage } = this;
    this.zoom = d3
      .zoom()
      .filter((event) =>
        event.type === "wheel"
          ? !event.shiftKey && !event.altKey && (!this.isPart || event.ctrlKey || event.metaKey)
          : !event.button,
      )
      .clickDistance(4)
      .on("zoom", ({ transform, sourceEvent }) => {
        if (transform.k === view.transform.k && sourceEvent?.type?.endsWith("move")) {
          const by = this.lastY - transform.y;
          for (const chart of this.charts) chart.scrollRows(by);
        }
        this.lastY = transform.y;
        view.transform = transform;
        view.changed();
      });
    this.area = d3.select(stage).call(this.zoom).on("dblclick.zoom", null);
    stage.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    for (const chart of this.charts) {
      chart.canvas.addEventListener("pointermove", (event) => this.onPoint(chart, event));
      chart.canvas.addEventListener("pointerleave", () => this.point(null));
      chart.canvas.addEventListener("click", (event) => this.onClick(chart, event));
      chart.canvas.addEventListener("keydown", (event) => this.onChartKey(chart, event));
    }
    document.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.resize()).observe(this.stage);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.changed());
    this.listenToPrinter();
  }

  /** Has paper be light, whatever the screen is. */
  listenToPrinter() {
    const { dataset } = document.documentElement;
    let theme;
    addEventListener("beforeprint", () => {
      theme = dataset.theme;
      dataset.theme = "light";
      this.draw();
    });
    addEventListener("afterprint", () => {
      if (theme) dataset.theme = theme;
      else delete dataset.theme;
      this.draw();
    });
  }

  // -- where we are in time ----------------------------------------------------------------------

  resize() {
    const { view, stage } = this;
    const width = Math.max(200, stage.clientWidth);
    const share = view.width > GUTTER ? (width - GUTTER) / (view.width - GUTTER) : 1;
    const { k, x } = view.transform;
    const moved = d3.zoomIdentity
      .translate(GUTTER - k * GUTTER + (x - GUTTER + k * GUTTER) * share, 0)
      .scale(k);
    view.width = width;
    const room = this.isPart
      ? 480
      : innerHeight - stage.getBoundingClientRect().top - scrollY - 24 - 34 * this.charts.length;
    for (const chart of this.charts) chart.resize(width, room / this.charts.length);
    this.zoom
      .extent([
        [GUTTER, 0],
        [width, 1],
      ])
      .translateExtent([
        [GUTTER, -Infinity],
        [width, Infinity],
      ])
      .scaleExtent([1, Math.max(1, Math.max(...view.runs.map((run) => run.numSteps)) / LEAST_STEPS)]);
    this.zoom.transform(this.area, moved);
    view.changed();
  }

  zoomBy(factor) {
    this.zoom.scaleBy(this.area, factor, [this.focus() ?? (GUTTER + this.view.width) / 2, 0]);
  }

  /** Returns where the chosen span is, in CSS pixels, if it is seen. */
  focus() {
    const { selected, x, width } = this.view;
    if (!selected || selected.span === null) return null;
    const at = x(this.view.begin(selected.run, selected.run.spans.start[selected.span]));
    return at > GUTTER && at < width ? at : null;
  }

  showAll() {
    this.zoom.transform(this.area, d3.zoomIdentity);
  }

  /** Shows the steps [start, end) of a run. */
  showSteps(run, start, end) {
    const { view } = this;
    const most = run.numSteps;
    const [first, last] = [Math.max(0, start), Math.min(most, Math.max(end, start + 1))];
    this.showTimes(view.begin(run, first), view.end(run, last));
  }

  showTimes(from, to) {
    const { base, width } = this.view;
    const [left, right] = [base(from), base(to)];
    const k = Math.min(
      this.zoom.scaleExtent()[1],
      Math.max(1, (width - GUTTER) / Math.max(1e-9, right - left)),
    );
    const shift = (GUTTER + width - k * (left + right)) / 2;
    const within = Math.min(GUTTER * (1 - k), Math.max(width * (1 - k), shift));
    this.zoom.transform(this.area, d3.zoomIdentity.translate(within, 0).scale(k));
  }

  /** Chooses a request, and shows the slots it held; the wait before, where it held none. */
  choose(run, sequence) {
    this.view.select(run, sequence);
    const leader = this.view.selected.sequence;
    const spans = run.spansOf(leader);
    const start = spans.length ? run.spans.start[spans[0]] : run.sequences.arrived[leader];
    const end = spans.length ? run.end(spans.at(-1)) : start + 1;
    const margin = Math.max(4, (end - start) / 4);
    this.showSteps(run, Math.floor(start - margin), Math.ceil(end + margin));
    if (spans.length) this.reveal(run, run.spans.slot[spans[0]]);
  }

  /** Scrolls the rows so that a slot is seen. */
  reveal(run, slot) {
    const chart = this.charts.find((one) => one.run === run);
    const y = slot * chart.rowHeight - chart.top;
    if (y < 0) chart.scrollRows(y);
    else if (y + chart.rowHeight > chart.rowsHeight) chart.scrollRows(y + chart.rowHeight - chart.rowsHeight);
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
    const isDark = getComputedStyle(root).colorScheme.includes("dark");
    root.dataset.theme = isDark ? "light" : "dark";
    this.view.changed();
  }

  // -- what people do ----------------------------------------------------------------------------

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

  onPoint(chart, event) {
    const box = chart.canvas.getBoundingClientRect();
    this.point(chart.at(event.clientX - box.left, event.clientY - box.top), event);
  }

  point(pointed, event) {
    this.view.pointed = pointed;
    this.tip.hidden = !pointed;
    if (pointed) {
      this.tip.replaceChildren(...pointedText(pointed, this.view).map((line) => element("div", {}, line)));
      const left = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8);
      const below = event.clientY + 18;
      const isLow = below + this.tip.offsetHeight > innerHeight;
      this.tip.style.left = `${Math.max(4, left)}px`;
      this.tip.style.top = `${isLow ? event.clientY - this.tip.offsetHeight - 10 : below}px`;
    }
    this.view.changed();
  }

  onClick(chart, event) {
    const box = chart.canvas.getBoundingClientRect();
    const pointed = chart.at(event.clientX - box.left, event.clientY - box.top);
    if (pointed && pointed.span >= 0)
      this.view.select(chart.run, chart.run.spans.sequence[pointed.span], pointed.span);
    else this.view.select(null);
    chart.canvas.focus({ preventScroll: true });
  }

  onChartKey(chart, event) {
    const { run } = chart;
    const page = chart.rowsHeight * 0.8;
    const move = (this.view.width - GUTTER) / 5 / this.view.transform.k;
    const actions = {
      ArrowLeft: () => (event.shiftKey ? this.step(run, -1, 0) : this.zoom.translateBy(this.area, move, 0)),
      ArrowRight: () => (event.shiftKey ? this.step(run, 1, 0) : this.zoom.translateBy(this.area, -move, 0)),
      ArrowUp: () => this.step(run, 0, -1),
      ArrowDown: () => this.step(run, 0, 1),
      Home: () => this.zoom.translateTo(this.area, GUTTER, 0, [GUTTER, 0]),
      End: () => this.zoom.translateTo(this.area, this.view.width, 0, [this.view.width, 0]),
      PageUp: () => chart.scrollRows(-page),
      PageDown: () => chart.scrollRows(page),
      "+": () => this.zoomBy(2),
      "=": () => this.zoomBy(2),
      "-": () => this.zoomBy(1 / 2),
      0: () => this.showAll(),
      "[": () => this.scaleRows(1 / 1.5),
      "]": () => this.scaleRows(1.5),
      Enter: () => this.panel.focus(),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    actions[event.key]();
    event.preventDefault();
    this.view.changed();
  }

  onKey(event) {
    const isTyping = event.target.matches?.("input, select, textarea") || this.controls.help.open;
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "/": () => this.controls.find.focus(),
      f: () => this.controls.find.focus(),
      n: () => this.controls.goTo(this.controls.hit + 1),
      p: () => this.controls.goTo(this.controls.hit - 1),
      s: () => this.switchScale(),
      t: () => this.switchTheme(),
      "?": () => this.controls.help.showModal(),
      Escape: () => this.view.select(null),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    action();
    event.preventDefault();
  }

  scaleRows(factor) {
    for (const chart of this.charts) chart.rowScale = Math.min(20, Math.max(0.2, chart.rowScale * factor));
    this.resize();
  }

  /** Chooses a neighbour of the chosen span: in its slot, or in the slot above or below. */
  step(run, inTime, inSlots) {
    const { view } = this;
    const { spans } = run;
    const chosen = view.selected?.run === run ? view.selected.span : null;
    let span = chosen;
    if (chosen === null) span = firstSeen(run, Math.floor(view.position(run, view.x.invert(GUTTER))));
    else if (inTime) {
      const at = run.placeAt(spans.slot[chosen], spans.start[chosen]) + inTime;
      const isOfSlot = at >= run.slotStart[spans.slot[chosen]] && at < run.slotStart[spans.slot[chosen] + 1];
      span = isOfSlot ? run.bySlot[at] : chosen;
    } else {
      for (let slot = spans.slot[chosen] + inSlots; slot >= 0 && slot < run.numSlots; slot += inSlots) {
        const at = run.placeAt(slot, spans.start[chosen]);
        if (at < 0) continue;
        span = run.bySlot[at];
        break;
      }
    }
    if (span === null || span === undefined || span < 0) return;
    view.select(run, spans.sequence[span], span);
    if (this.focus() === null)
      this.zoom.translateTo(this.area, view.base(view.begin(run, spans.start[span])), 0);
    this.reveal(run, spans.slot[span]);
    this.controls.say(
      pointedText({ run, step: spans.start[span], slot: spans.slot[span], span }, view).join(", "),
    );
  }

  // -- what is shown -----------------------------------------------------------------------------

  tell(selected) {
    const goTo = (run) => (start, end) => this.showSteps(run, start - 2, end + 2);
    const told = [];
    const { diff } = this.facts;
    const runs = diff ? this.view.runs : [selected?.run];
    for (const run of selected ? runs : []) {
      const sequence = run === selected.run ? selected.sequence : this.twin(run, selected);
      if (diff) told.push(element("h2", {}, `In ${"AB"[this.view.runs.indexOf(run)]}`));
      told.push(
        sequence === null
          ? element("p", {}, "There is no such request.")
          : storyOfRequest(this, run, sequence, goTo(run)),
      );
    }
    if (diff)
      told.push(differences(diff, goTo(this.view.runs[0]), (id, index) => this.chooseNamed(id, index)));
    if (!told.length)
      told.push(
        element(
          "p",
          { class: "hint" },
          "Click on a request, or choose one with Shift and the arrow keys: its story stands here. ",
          "Press ? for all keys.",
        ),
      );
    this.panel.replaceChildren(...told);
    this.panel.scrollTop = 0;
  }

  /** Returns the sequence of another run that has the name of the chosen one; null for none. */
  twin(run, { run: chosenRun, sequence }) {
    const { id, index } = chosenRun.sequences;
    return run.named(id.at(sequence), index[sequence])[0] ?? null;
  }

  chooseNamed(id, index) {
    for (const run of this.view.runs) {
      const [found] = run.named(id, index);
      if (found !== undefined) return this.choose(run, found);
    }
  }

  draw() {
    this.drawAxis();
    for (const chart of this.charts) chart.draw();
  }

  drawAxis() {
    const { axis, view } = this;
    const ratio = devicePixelRatio || 1;
    const height = 24;
    axis.width = Math.round(view.width * ratio);
    axis.height = height * ratio;
    axis.style.height = `${height}px`;
    const context = axis.getContext("2d");
    const colors = colorsOfPage();
    const { x } = view;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = context.strokeStyle = colors.text;
    context.font = "11px system-ui, sans-serif";
    const format = view.isTimed ? x.tickFormat(view.width / 110) : (step) => counted(step);
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

/** Returns the first span from `step` on, of the lowest slot that has one; undefined for none. */
function firstSeen(run, step) {
  for (let slot = 0; slot < run.numSlots; slot++) {
    const at = firstAbove(run.ends, step, run.slotStart[slot], run.slotStart[slot + 1]);
    if (at < run.slotStart[slot + 1]) return run.bySlot[at];
  }
}

/** Returns in short what run it is. */
function headline(run) {
  const { batch, policy, model } = run.settings;
  const { num_requests: requests, num_outputs: outputs } = run.facts;
  return [
    plural(requests, "request"),
    ...(outputs === requests ? [] : [plural(outputs, "output")]),
    plural(run.numSteps, "step"),
    plural(batch, "slot"),
    ...run.facts.restarts.map(({ step, reason }) => `worker replaced before step ${counted(step)} (${reason})`),
    visible(policy, 40),
    visible(model, 60),
  ].join(", ");
}

async function begin() {
  const place = document.getElementById("page");
  place.replaceChildren(element("p", {}, "Reading the run …"));
  try {
    const facts = JSON.parse(utf8(bytesOf(document.getElementById("facts").textContent.trim())));
    const texts = [...document.querySelectorAll("script.run")].map((script) =>
      script.textContent.trimStart(),
    );
    const runs = [];
    for (const text of texts) runs.push(new Run(await unpack(text)));
    place.replaceChildren();
    globalThis.page = new Page(place, runs, facts);
    place.dataset.ready = "yes";
  } catch (error) {
    place.replaceChildren(element("p", { role: "alert" }, `This page cannot be shown: ${error.message}`));
    throw error;
  }
}

begin();
