"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const COLOURS = 8;
  const MOST_IN_TIP = 16;
  const HEIGHTS = { metric: 310, schedule: 185 };
  // `hidden` has group numbers and "group/run" keys; `range` is the zoomed x range, or null.
  const state = { axis: "steps", smoothing: 0, seeds: true, bands: true, hidden: new Set(), range: null };
  const kindOf = (name) => (name.startsWith("eval_") ? "eval" : "train");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let plots = [];

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function css(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  const colourName = (group) => `--colour-${group % COLOURS}`;
  const colourOf = (group) => css(colourName(group));
  const dashOf = (group) => (group < COLOURS ? undefined : [8, 4]);
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  function shortNumber(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    return size >= 1e3 ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : String(+value.toPrecision(4));
  }

  function shortSteps(exact) {
    const value = exact >= 100 ? Math.round(exact) : exact;
    if (value >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
    return value >= 1e4 ? `${+(value / 1e3).toPrecision(4)}k` : String(+value.toPrecision(6));
  }

  function shortTime(seconds) {
    const whole = Math.round(seconds);
    if (whole < 60) return `${+seconds.toPrecision(3)} s`;
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return hours ? `${hours}:${String(minutes).padStart(2, "0")} h` : `${minutes}:${String(rest).padStart(2, "0")} min`;
  }

  const shortX = (value) => (state.axis === "steps" ? shortSteps(value) : shortTime(value));

  // [x, y] of numbers alone, with x increasing.
  function pairs(xs, ys) {
    const points = [[], []];
    xs.forEach((x, i) => {
      if (x === null || ys[i] === null || ys[i] === undefined) return;
      if (points[0].length && x <= points[0][points[0].length - 1]) return;
      points[0].push(x);
      points[1].push(ys[i]);
    });
    return points;
  }

  // Exponential moving average, divided by the weight that its first values lack.
  function smooth(ys, weight) {
    let mean = 0, total = 0;
    return weight === 0 ? ys : ys.map((y) => {
      mean = weight * mean + (1 - weight) * y;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  function isShown(group, run) {
    return !state.hidden.has(String(group)) && (run === undefined || !state.hidden.has(`${group}/${run}`));
  }

  // The values of a schedule that a run shares with one that is drawn. Over steps they would be the same line.
  function sharedSchedule(name, group, run) {
    if (state.axis === "steps" || !run.same.includes(name)) return undefined;
    const { steps, values } = group.runs.find((other) => other.train.values[name]).train;
    return run.train.steps.map((step) => values[name][nearest(steps, step)]);
  }

  // The lines of a panel: of each seed, and of each group with its interval.
  function linesOf(panel) {
    const found = [];
    const weight = panel.schedule ? 0 : state.smoothing;
    data.groups.forEach((group, g) => {
      const bands = group.bands[panel.name];
      const band = bands && bands[state.axis];
      group.runs.forEach((run, r) => {
        const column = run[kindOf(panel.name)];
        const values = column.values[panel.name] || sharedSchedule(panel.name, group, run);
        const alone = panel.schedule || group.runs.length === 1;
        if (!values || !isShown(g, panel.schedule ? undefined : r) || !(alone || state.seeds || !band)) return;
        const [x, y] = pairs(column[state.axis], values);
        if (!x.length) return;
        const label = panel.schedule ? "" : `seed ${run.seed}`;
        found.push({ kind: alone ? "alone" : "seed", group: g, label, status: run.status, x, y: smooth(y, weight) });
      });
      if (band && state.bands && isShown(g)) {
        const part = (name) => smooth(band[name], weight);
        found.push({
          kind: "band", group: g, of: group.runs.length, runs: band.runs,
          x: band.x, y: part("iqm"), low: part("low"), high: part("high"),
        });
      }
    });
    return found;
  }

  // The mean in pieces: where all runs are in it, and (`part`) where only some are, each joined to the one before.
  function piecesOf({ x, y, runs, of }) {
    const found = [];
    x.forEach((_, i) => {
      const part = runs[i] < of, last = found[found.length - 1];
      if (last && last.part === part) return void (last.x.push(x[i]), last.y.push(y[i]));
      const joined = last && !last.part ? [i - 1, i] : [i];
      if (last && last.part) (last.x.push(x[i]), last.y.push(y[i]));
      found.push({ part, x: joined.map((k) => x[k]), y: joined.map((k) => y[k]) });
    });
    return found;
  }

  function seriesOf(line) {
    const colour = colourOf(line.group);
    const base = { points: { show: line.x.length === 1, size: 5 }, dash: dashOf(line.group) };
    if (line.kind === "band") {
      const edge = { ...base, stroke: "transparent", width: 0, points: { show: false } };
      const mean = { ...base, stroke: colour, width: 2.5 };
      return [edge, edge, ...piecesOf(line).map(({ part }) => (part ? { ...mean, dash: [4, 4] } : mean))];
    }
    const thick = line.kind === "alone";
    return [{ ...base, stroke: thick ? colour : faded(colour, 0.45), width: thick ? 2 : 1 }];
  }

  function fullRange() {
    let most = 0;
    for (const group of data.groups)
      for (const run of group.runs)
        for (const kind of ["train", "eval"])
          for (const x of run[kind][state.axis]) if (x > most) most = x;
    return [0, most || 1];
  }

  function setRange(range) {
    state.range = range;
    byId("whole").disabled = range === null;
    const [min, max] = range || fullRange();
    for (const { plot } of plots) plot.setScale("x", { min, max });
  }

  // A cross where a failed run ends, a square where a stopped one does.
  function drawEnds(plot, lines) {
    const { ctx } = plot;
    const size = 4 * devicePixelRatio;
    ctx.save();
    for (const line of lines) {
      const failed = line.kind !== "band" && line.status.startsWith("failed");
      const stopped = line.kind !== "band" && line.status.startsWith("stopped");
      const last = line.x.length - 1;
      if (!failed && !stopped) continue;
      const x = plot.valToPos(line.x[last], "x", true), y = plot.valToPos(line.y[last], "y", true);
      const { left, top, width, height } = plot.bbox;
      if (x < left - 1 || x > left + width + 1 || y < top - 1 || y > top + height + 1) continue;
      ctx.strokeStyle = ctx.fillStyle = colourOf(line.group);
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.setLineDash([]);
      if (failed) {
        ctx.beginPath();
        for (const [dx, dy] of [[1, 1], [1, -1]]) {
          ctx.moveTo(x - size * dx, y - size * dy);
          ctx.lineTo(x + size * dx, y + size * dy);
        }
        ctx.stroke();
      } else ctx.fillRect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
    }
    ctx.restore();
  }

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  }

  // For each group a heading with its mean and interval, and the values of its seeds, at the x under the mouse.
  function tipRows(lines, x, [min, max]) {
    const margin = (max - min) / 20;
    const near = lines.filter((line) => x >= line.x[0] - margin && x <= line.x[line.x.length - 1] + margin);
    return [...new Set(near.map((line) => line.group))].map((group) => {
      const own = near.filter((line) => line.group === group);
      const at = (line, name) => shortNumber(line[name][nearest(line.x, x)]);
      const swatch = element("span", { className: "swatch" });
      swatch.style.setProperty("--own", `var(${colourName(group)})`);
      const box = element("div", {}, swatch, element("b", {}, data.groups[group].name));
      for (const line of own.filter(({ kind }) => kind === "band"))
        box.append(element("div", {}, `IQM ${at(line, "y")} [${at(line, "low")} to ${at(line, "high")}], ${at(line, "runs")} of ${line.of} runs`));
      const seeds = own.filter(({ kind }) => kind !== "band");
      const texts = seeds.slice(0, MOST_IN_TIP).map((line) => `${line.label ? `${line.label}: ` : ""}${at(line, "y")}`);
      if (seeds.length > MOST_IN_TIP) texts.push(`and ${seeds.length - MOST_IN_TIP} more`);
      if (texts.length) box.append(element("div", { className: "seeds" }, texts.join(", ")));
      return box;
    });
  }

  function showTip(entry) {
    const { plot, lines, tip, box } = entry;
    const { left, top } = plot.cursor;
    if (!entry.hovered || left < 0) {
      tip.style.display = "none";
      return;
    }
    const x = plot.posToVal(left, "x");
    const rows = tipRows(lines, x, [plot.scales.x.min, plot.scales.x.max]);
    tip.replaceChildren(element("div", {}, `${shortX(x)}${state.axis === "steps" ? " steps" : ""}`), ...rows);
    tip.style.display = "block";
    const offset = plot.over.getBoundingClientRect(), outer = box.getBoundingClientRect();
    const place = left + offset.left - outer.left;
    const right = place + 16 + tip.offsetWidth > outer.width;
    tip.style.left = `${Math.max(0, right ? place - 16 - tip.offsetWidth : place + 16)}px`;
    tip.style.top = `${top + offset.top - outer.top + 12}px`;
  }

  function axes() {
    const common = { stroke: css("--faint"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    return [
      {
        ...common, values: (_, splits) => splits.map(shortX), space: 70, label: state.axis === "steps" ? "env steps" : "wall-clock time",
        labelFont: "12px system-ui, sans-serif", labelSize: 18, labelGap: -2, size: 36,
      },
      { ...common, values: (_, splits) => splits.map(shortNumber), size: 62 },
    ];
  }

  function makePlot(panel, box) {
    const lines = linesOf(panel);
    const tables = [], series = [{}], bands = [];
    for (const line of lines) {
      if (line.kind === "band") {
        const first = series.length;
        bands.push({ series: [first + 1, first], fill: faded(colourOf(line.group), 0.18) });
        tables.push([line.x, line.low, line.high], ...piecesOf(line).map(({ x, y }) => [x, y]));
      } else tables.push([line.x, line.y]);
      series.push(...seriesOf(line));
    }
    const entry = { panel, lines, box, hovered: false, tip: element("div", { className: "tip" }) };
    const [min, max] = state.range || fullRange();
    const options = {
      width: box.clientWidth, height: HEIGHTS[panel.schedule ? "schedule" : "metric"], series, bands, axes: axes(),
      legend: { show: false },
      scales: { x: { time: false, min, max, auto: false }, y: { range: { min: { pad: 0.08 }, max: { pad: 0.08 } } } },
      cursor: {
        sync: { key: "x", scales: ["x", null] }, points: { show: false }, drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => setRange(null) },
      },
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map((place) => plot.posToVal(place, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (entry.hovered) setRange(ends); // the same selection is shown in the other panels
        }],
        setCursor: [() => showTip(entry)],
        draw: [(plot) => drawEnds(plot, lines)],
      },
    };
    const joined = tables.length ? uPlot.join(tables) : [[]];
    entry.plot = new uPlot(options, joined, box);
    if (!lines.length) box.append(element("p", {}, "nothing to draw"));
    box.append(entry.tip);
    entry.plot.over.addEventListener("mouseenter", () => { entry.hovered = true; });
    entry.plot.over.addEventListener("mouseleave", () => { entry.hovered = false; showTip(entry); });
    return entry;
  }

  function fit() {
    for (const { plot, box } of plots)
      if (box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: plot.height });
  }

  function draw() {
    for (const { plot } of plots) plot.destroy();
    // All boxes before the first plot: the columns, whose width a plot takes, depend on how many there are.
    const boxes = data.panels.map(({ title }) => element("div", { className: "panel" }, element("h3", {}, title)));
    byId("panels").replaceChildren(...boxes);
    plots = data.panels.map((panel, i) => makePlot(panel, boxes[i]));
    const untimed = data.groups.flatMap((group) => group.runs)
      .map((run) => [...run.train.seconds, ...run.eval.seconds])
      .filter((seconds) => seconds.length && seconds.every((each) => each === null)).length;
    byId("note").textContent = state.axis === "seconds" && untimed ? `runs without wall-clock times in their logs, which are not drawn: ${untimed}` : "";
  }

  function toggle(key) {
    if (!state.hidden.delete(key)) state.hidden.add(key);
    drawLegend();
    draw();
  }

  function drawLegend() {
    const rows = data.groups.map((group, g) => {
      const button = (key, text, properties) => {
        const made = element("button", { type: "button", onclick: () => toggle(key), ...properties }, text);
        made.setAttribute("aria-pressed", String(!state.hidden.has(key)));
        made.style.setProperty("--own", `var(${colourName(g)})`);
        return made;
      };
      const markOf = ({ status }) => (status.startsWith("failed") ? " ×" : status.startsWith("stopped") ? " ■" : "");
      const bad = ({ status }) => (status.startsWith("failed") ? "bad" : "");
      const seeds = group.runs.map((run, r) => button(`${g}/${r}`, `seed ${run.seed}${markOf(run)}`, {
        className: `seed ${bad(run)}`, title: `${run.name}: ${run.status}`,
      }));
      if (seeds.length > 1) return element("div", {}, button(String(g), group.name, { title: "show or hide this group" }), ...seeds);
      const [run] = group.runs;
      return element("div", {}, button(String(g), group.name + markOf(run), { className: bad(run), title: `${run.name}: ${run.status}` }));
    });
    byId("legend").replaceChildren(...rows);
  }

  const TEXT = ["group", "differences", "hardware", "versions", "commit", "run", "status", "folders"];
  const LONG = ["differences", "hardware", "versions", "status", "folders"];

  function fillTable(table, { headings, rows }, swatches) {
    const cell = (tag, text, heading) => {
      const names = [TEXT.includes(heading) && "text", tag === "td" && LONG.includes(heading) && "long"];
      if (tag === "td" && /failed|without a score/.test(text) && ["status", "seeds"].includes(heading)) names.push("bad");
      return element(tag, { className: names.filter(Boolean).join(" ") }, text);
    };
    const head = element("tr", {}, ...headings.map((heading) => cell("th", heading, heading)));
    const body = rows.map((row, g) => {
      const cells = row.map((text, i) => cell("td", text, headings[i]));
      if (swatches) {
        const swatch = element("span", { className: "swatch" });
        swatch.style.setProperty("--own", `var(${colourName(g)})`);
        cells[0].prepend(swatch);
      }
      return element("tr", {}, ...cells);
    });
    table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  }

  byId("title").textContent = data.title;
  byId("made").textContent = `made ${data.made} by rl_training ${data.version}`;
  byId("metric").textContent = data.metric;
  fillTable(byId("groups"), data.table, true);
  fillTable(byId("runs"), data.runs, false);
  drawLegend();
  draw();

  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("controls").addEventListener("input", ({ target }) => {
    if (target.name === "axis") [state.axis, state.range] = [target.value, null];
    else state[target.name] = target.type === "checkbox" ? target.checked : Number(target.value);
    byId("smoothing").textContent = state.smoothing;
    byId("whole").disabled = state.range === null;
    draw();
  });
  byId("whole").addEventListener("click", () => setRange(null));
  dark.addEventListener("change", draw);
  new ResizeObserver(fit).observe(byId("panels"));
  window.report = { state, setRange, plots: () => plots }; // for the console, and for tests
})();
