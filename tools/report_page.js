"use strict";
// Builds the page from `content`, which report.py returns. Elements are created once; when the content of a live page
// changes (report_live.js), refresh() updates them in place. Fetches nothing.
let content = null;
let figures = new Map(), loads = [], stepRange = [0, 1];
// Okabe and Ito's colors, which color-blind readers can distinguish; lighter on a dark page.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#5d3a9b", "#7f7f7f", "#56b4e9", "#8c6d31", "#a50f15"];
const DARK = ["#56b4e9", "#ff8c42", "#2fc79a", "#e29cc4", "#f0c04a", "#b79cff", "#a8b0ba", "#8fb8ff", "#c9b27c", "#ff6b6b"];
const main = document.querySelector("main");
const plots = new Map();  // by id: {element, draw, stepAxis, onClick, isStale}
let updaters = [];  // functions that update texts and tables
const choices = new Map();  // by id of a card: the reader's choices in it, which outlive its elements
let zoom = null, zooming = false;  // range of steps shown; null: all

function add(parent, tag, options = {}, text = undefined) {
  const element = parent.appendChild(document.createElement(tag));
  Object.assign(element, options);
  if (text !== undefined) element.textContent = text;
  return element;
}

function color(index) { const palette = darkness.matches ? DARK : LIGHT; return palette[index % palette.length]; }

// text: a string, or a function that returns one if the text may change.
function addText(parent, tag, options, text) {
  const element = add(parent, tag, options);
  const update = () => {
    const now = typeof text === "function" ? text() : text;
    if (element.textContent !== now) element.textContent = now;
  };
  update();
  if (typeof text === "function") updaters.push(update);
  return element;
}

function chosen(id, initial) {
  if (!choices.has(id)) choices.set(id, initial);
  return choices.get(id);
}

// Escapes names chosen by users, because plotly would interpret parts of them as markup.
function plain(text) { return text.replace(/[&<>]/g, letter => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"})[letter]); }

function layout(axes, id) {
  // zoomAll preserves the range of steps. All other settings of the reader are preserved while uirevision is unchanged.
  const revision = axes.x.title === "step" ? {uirevision: Math.random()} : {};
  return themed({
    showlegend: axes.legend ?? false, hovermode: axes.hover ?? "x unified",
    legend: {orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0, font: {size: 12}},
    uirevision: id,
    xaxis: {...revision, ...axes.x, title: {text: axes.x.title}}, yaxis: {...axes.y, title: {text: axes.y.title}},
    barmode: axes.barmode ?? "overlay", shapes: axes.shapes ?? [], annotations: axes.annotations ?? [],
  });
}

// Adds a card with a figure. draw() returns {traces, axes} for the current content and colors.
function addPlot(grid, {id, title, note, draw, stepAxis, controls, height, wide, onClick}) {
  const card = add(grid, "div", {className: wide ? "card wide" : "card", id: id});
  const top = add(card, "div", {className: "top"});
  addText(top, "h3", {}, title);
  if (note) addText(card, "p", {className: "quiet"}, note);
  if (controls) controls(top, card);
  const element = add(card, "div", {className: "plot"});
  if (height) element.style.height = height + "px";
  const plot = {id, element, draw, stepAxis, onClick};
  plots.set(id, plot);
  return plot;
}

function redraw(plot) {
  const {traces, axes} = plot.draw();
  plot.isStale = false;
  if (axes.x.title === "step") axes.x.range = zoom ?? stepRange;
  Plotly.react(plot.element, traces, layout(axes, plot.id), plotConfig());
}

// All figures over steps show the same range of steps.
function zoomAll(from, change) {
  const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"], all = change["xaxis.autorange"];
  if (zooming || (low === undefined && !all)) return;
  zooming = true;
  zoom = all ? null : [low, high];
  const update = {"xaxis.range": zoom ?? stepRange};
  Promise.all([...plots.values()].filter(plot => plot.stepAxis && (all || plot !== from))
    .map(plot => Plotly.relayout(plot.element, update))).then(() => { zooming = false; });
}

// First to last step of all runs, with a margin for markers at the ends.
function rangeOfSteps() {
  const steps = content.figures.flatMap(figure => figure.traces.flatMap(trace => [trace.x[0], trace.x[trace.x.length - 1]]));
  const first = Math.min(...steps), last = Math.max(...steps), margin = Math.max(0.02 * (last - first), 0.5);
  return steps.length ? [first - margin, last + margin] : [0, 1];
}

// Marks where a run was resumed with dotted lines.
function resumes() {
  const shapes = [], annotations = [];
  content.runs.forEach((run, index) => run.resumes.forEach((resume, count) => {
    const line = {color: content.runs.length > 1 ? color(index) : css("--quiet"), width: 1, dash: "dot"};
    shapes.push({type: "line", x0: resume.step, x1: resume.step, yref: "paper", y0: 0, y1: 1, line});
    // Labels of many restarts would overlap.
    if (run.resumes.length <= 4 && content.runs.length === 1)
      annotations.push({x: resume.step, yref: "paper", y: 1, yanchor: "top", xanchor: "left", showarrow: false,
                        text: "resumed", bgcolor: css("--card"), hovertext: plain("resumed " + resume.when), font: {size: 10, color: css("--quiet")}});
  }));
  return {shapes, annotations};
}

function drawLines(figure, log) {
  // Stacked areas of several runs would hide each other, and logarithms cannot be stacked.
  const stacked = figure.stacked && !log && content.runs.length === 1;
  const traces = figure.traces.map(trace => ({
    ...(stacked ? {stackgroup: "all"} : {}),
    x: trace.x, y: trace.y, name: plain(trace.name), mode: trace.mode, type: "scatter",
    line: {color: color(trace.color), dash: trace.dash ?? "solid", width: trace.pale ? 1 : 2,
           shape: figure.steps ? "hv" : "linear"},
    marker: {color: color(trace.color), symbol: trace.symbol ?? "circle", size: trace.symbol ? 7 : 5},
    opacity: trace.pale ? 0.35 : 1, showlegend: !trace.pale, hoverinfo: trace.pale ? "skip" : undefined,
    hovertemplate: trace.pale ? undefined : "%{y:.5g}",
  }));
  const y = {title: figure.axis, type: log ? "log" : "linear", exponentformat: "power", minexponent: 6, separatethousands: true};
  if (log) Object.assign(y, {dtick: spread(figure) > 30 ? 1 : spread(figure) > 5 ? "D2" : "D1", tickformat: "~g"});
  // The scale of a constant line would be meaningless.
  else if (figure.fromZero || spread(figure) === 1) y.rangemode = "tozero";
  else if (figure.range) y.range = figure.range;
  const shown = traces.filter(trace => trace.showlegend);
  const legend = shown.length > 1 || Boolean(figure.named && shown.length);
  // Plotly omits the legend entry of a single line unless showlegend is set.
  if (legend) for (const trace of shown) trace.showlegend = true;
  return {traces, axes: {x: {title: "step"}, y, legend, ...resumes()}};
}

function spread(figure) {
  let low = Infinity, high = 0;
  for (const trace of figure.traces) for (const y of trace.y) if (y > 0) { low = Math.min(low, y); high = Math.max(high, y); }
  return high / low;
}

function drawHeat(figure) {
  const {x, y, z} = figure.traces[0];
  const trace = {x, y, z, type: "heatmap", colorscale: "Cividis", colorbar: {title: {text: figure.unit, side: "right"}, thickness: 12},
                 hovertemplate: "step %{x}, layer %{y}: %{z:.5g}<extra></extra>"};
  return {traces: [trace], axes: {x: {title: "step"}, y: {title: "layer"}, hover: "closest"}};
}

function addFigure(grid, {id, log}) {
  const choice = chosen(id, {log}), figure = () => figures.get(id);
  const toggle = top => {
    const label = add(top, "label");
    const box = add(label, "input", {type: "checkbox", checked: choice.log});
    label.append(" log scale");
    box.onchange = () => { choice.log = box.checked; redraw(plot); };
  };
  const plot = addPlot(grid, {
    id, title: () => figure().title, note: figure().note, stepAxis: true, controls: figure().heat ? undefined : toggle,
    draw: () => figure().heat ? drawHeat(figure()) : drawLines(figure(), choice.log),
  });
}

// Expert load: three heat maps of the same numbers.
function unpack(packed) {
  const layers = packed.layers.length, experts = packed.num_experts;
  const views = packed.shares.map(text => new DataView(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)).buffer));
  const share = (bin, layer, expert) => packed.units[bin] * views[bin].getUint16(2 * (layer * experts + expert), true);
  const steps = packed.first.map((first, bin) => first === packed.last[bin] ? `step ${first}` : `steps ${first} to ${packed.last[bin]}`);
  const centres = packed.first.map((first, bin) => (first + packed.last[bin]) / 2);
  const rows = range(layers), columns = range(views.length);
  const busiest = rows.map(row => columns.map(column => Math.max(...range(experts).map(expert => share(column, row, expert)))));
  return {share, steps, centres, busiest, layers: packed.layers, experts, bins: views.length};
}

// Unpacks again only if there is new data.
function unpackNew(packed, before) {
  const sign = [packed.first[0], packed.last.at(-1), packed.shares.length, packed.shares.at(-1)].join(" ");
  return before && before.sign === sign ? before : {...unpack(packed), sign};
}

function range(count) { return Array.from({length: count}, (_, index) => index); }

// Logarithmic in the even share: white is even, blue is idle, red is overloaded.
function balanceTrace(rows, x, y, names) {
  const bound = 3;
  return {
    x, y, type: "heatmap", z: rows.map(row => row.map(share => Math.max(-bound, Math.min(bound, Math.log2(share))))),
    customdata: rows, text: names, zmin: -bound, zmax: bound,
    colorscale: [[0, "#053061"], [0.2, "#2f79b5"], [0.4, "#a7cfe4"], [0.5, "#f7f7f7"], [0.6, "#f6b896"], [0.8, "#c94741"], [1, "#67001f"]],
    hovertemplate: "%{text}<br>%{customdata:.3g} times the even share<extra></extra>",
    colorbar: {title: {text: "load / even load", side: "right"}, thickness: 12, tickvals: [-3, -2, -1, 0, 1, 2, 3],
               ticktext: ["1/8 or less", "1/4", "1/2", "even", "2", "4", "8 or more"]},
  };
}

function addLoads(grid, index, name) {
  const ofRun = name ? ` (${name})` : "", data = () => loads[index];
  // bin null: always the latest.
  const choice = chosen("loads" + ofRun, {layer: 0, bin: null});
  const binOf = () => Math.min(choice.bin ?? Infinity, data().bins - 1);
  const height = Math.min(700, 300 + Math.max(2 * data().experts, 5 * data().layers.length));
  const dtick = data().layers.length <= 16 ? 1 : undefined;
  const expertTick = data().experts <= 16 ? 1 : undefined;
  const overview = addPlot(grid, {
    id: "load-overview" + ofRun, title: "Busiest expert of each layer" + ofRun, stepAxis: true, wide: true,
    note: "Its load relative to an even share; 1 is perfect balance. A click selects that layer and step in the maps below.",
    draw: () => {
      const {busiest, centres, layers, steps} = data();
      const top = Math.max(1, Math.ceil(Math.log2(Math.max(...busiest.map(row => Math.max(...row))))));
      const ticks = top === 1 ? [1, 1.2, 1.4, 1.6, 1.8, 2] : range(top + 1).map(power => 2 ** power);
      return {
        traces: [{x: centres, y: layers, z: busiest.map(row => row.map(Math.log2)), type: "heatmap",
                  colorscale: "Cividis", zmin: 0, zmax: top, text: layers.map(() => steps), customdata: busiest,
                  colorbar: {title: {text: "busiest / even load", side: "right"}, thickness: 12,
                             tickvals: ticks.map(Math.log2), ticktext: ticks.map(String)},
                  hovertemplate: "layer %{y}, %{text}<br>busiest expert: %{customdata:.3g} times the even share<extra></extra>"}],
        axes: {x: {title: "step"}, y: {title: "layer", dtick}, hover: "closest"},
      };
    },
    onClick: event => {
      const [row, column] = event.points[0].pointNumber;
      choice.layer = row;
      choice.bin = column;
      sliders.forEach(show => show());
      redraw(layerPlot);
      redraw(stepPlot);
    },
  });
  const sliders = [];
  const layerPlot = addPlot(grid, {
    id: "load-layer" + ofRun, title: "Experts of one layer" + ofRun, stepAxis: true, height,
    note: "Tokens of each expert relative to an even share.",
    controls: (top, card) => sliders.push(slider(card, "layer", () => data().layers.map(layer => `layer ${layer}`), {
      get: () => choice.layer, set: value => { choice.layer = value; redraw(layerPlot); },
    })),
    draw: () => {
      const {share, experts, bins, centres, steps, layers} = data(), layer = choice.layer;
      const rows = range(experts).map(expert => range(bins).map(column => share(column, layer, expert)));
      const names = rows.map((_, expert) => steps.map(step => `layer ${layers[layer]}, expert ${expert}, ${step}`));
      return {traces: [balanceTrace(rows, centres, range(experts), names)],
              axes: {x: {title: "step"}, y: {title: `expert of layer ${layers[layer]}`, dtick: expertTick}, hover: "closest"}};
    },
  });
  const stepPlot = addPlot(grid, {
    id: "load-step" + ofRun, title: "All layers at one time" + ofRun, height,
    note: "Tokens of each expert relative to an even share.",
    controls: (top, card) => sliders.push(slider(card, "step", () => data().steps, {
      get: binOf, set: value => { choice.bin = value === data().bins - 1 ? null : value; redraw(stepPlot); },
    })),
    draw: () => {
      const {share, experts, steps, layers} = data(), bin = binOf();
      const rows = layers.map((_, row) => range(experts).map(expert => share(bin, row, expert)));
      const names = rows.map((_, row) => range(experts).map(expert => `layer ${layers[row]}, expert ${expert}, ${steps[bin]}`));
      return {traces: [balanceTrace(rows, range(experts), layers, names)],
              axes: {x: {title: `expert (${steps[bin]})`, dtick: expertTick}, y: {title: "layer", dtick}, hover: "closest"}};
    },
  });
}

// names(): labels of the slider's positions, whose number may grow.
function slider(card, word, names, {get, set}) {
  const row = add(card, "div", {className: "controls"});
  const input = add(row, "input", {type: "range", min: 0, ariaLabel: word});
  const shown = add(row, "span");
  const show = () => {
    input.max = names().length - 1;
    input.value = get();
    shown.textContent = names()[get()];
  };
  input.oninput = () => { set(+input.value); show(); };
  show();
  updaters.push(show);
  return show;
}

function addSection(title) {
  const id = "section-" + title.toLowerCase().replace(/\W+/g, "-");
  add(document.querySelector("nav"), "a", {href: "#" + id}, title);
  const section = add(main, "section", {id});
  add(section, "h2", {}, title);
  return section;
}

// rows(): lists of cells; the table is rebuilt when they change. className "long": cells of any length, which wrap.
function addTable(parent, titles, rows, className = "scroll long") {
  const table = add(add(parent, "div", {className}), "table");
  const head = add(add(table, "thead"), "tr");
  titles.forEach(title => add(head, "th", {}, title));
  const body = add(table, "tbody");
  let shown = "";
  const update = () => {
    const now = JSON.stringify(rows());
    if (now === shown) return;
    shown = now;
    body.replaceChildren();
    for (const cells of rows()) {
      const row = add(body, "tr");
      cells.forEach(cell => add(row, "td", {}, cell));
    }
  };
  update();
  updaters.push(update);
  return body;
}

function addHead() {
  document.title = "Run report: " + content.title;
  document.querySelector("h1").textContent = content.title;
  const about = document.getElementById("about");
  about.replaceChildren();
  content.runs.forEach(run => {
    add(about, "p", {className: "quiet"}, run.path);
    run.notes.forEach(note => add(about, "p", {className: "quiet"}, note));
  });
  const section = addSection("Summary");
  if (content.runs.length === 1) {
    const grid = add(section, "div", {className: "facts"});
    let shown = "";
    const update = () => {
      const facts = content.runs[0].facts, now = JSON.stringify(facts);
      if (now === shown) return;
      shown = now;
      grid.replaceChildren();
      for (const [name, value] of Object.entries(facts)) {
        const fact = add(grid, "div");
        add(fact, "span", {className: "quiet"}, name);
        add(fact, "b", {}, value);
      }
    };
    update();
    updaters.push(update);
  } else {
    const names = () => [...new Set(content.runs.flatMap(run => Object.keys(run.facts)))];
    addTable(section, ["", ...content.runs.map(run => run.name)],
             () => names().map(name => [name, ...content.runs.map(run => run.facts[name] ?? "")]), "card scroll");
  }
}

// One row per bucket, in launch order: ready, communicating, waited for.
function addTimeline(grid, index, name) {
  const ofRun = name ? ` (${name})` : "", timeline = () => content.timelines[index];
  const bars = (names, label, tint, spans) => ({
    type: "bar", orientation: "h", name: label, y: spans.map(span => names[span.row]), base: spans.map(span => span.begin),
    x: spans.map(span => Math.max(span.end - span.begin, 0)), marker: {color: tint},
    hovertemplate: `${label}: %{base:.4~g} to %{customdata:.4~g} ms<extra>%{y}</extra>`, customdata: spans.map(span => span.end),
  });
  addPlot(grid, {
    id: "timeline" + ofRun, title: () => `Buckets of step ${timeline().step}` + ofRun, wide: true,
    height: Math.min(900, 160 + 26 * timeline().rows.length),
    note: "Time 0 is the end of the previous step's reductions. Ready: the bucket's last gradient (or its update) is " +
          "computed, but its collective is not launched yet. The dotted line is the end of backward. Each launch should " +
          "be before the next bucket is ready. Agree: ranks that have finished backward wait for the others.",
    draw: () => {
      const {rows, backward_end} = timeline(), names = rows.map(row => plain(row.name));
      return {
      traces: [
        bars(names, "ready, not launched", css("--line"), rows.map((row, index) => ({row: index, begin: row.ready, end: row.launched}))),
        bars(names, "communicating", color(0), rows.map((row, index) => ({row: index, begin: row.launched, end: row.done}))),
        {...bars(names, "waited for", color(1), rows.flatMap((row, index) => row.waits.map(([begin, end]) => ({row: index, begin, end})))), width: 0.3},
      ],
      axes: {
        x: {title: "milliseconds"}, legend: true, hover: "closest",
        y: {title: "bucket", autorange: "reversed", type: "category", categoryorder: "array", categoryarray: names},
        shapes: [{type: "line", x0: backward_end, x1: backward_end, yref: "paper", y0: 0, y1: 1,
                  line: {color: css("--text"), width: 1, dash: "dot"}}],
      },
      };
    },
  });
}


function addStashes(grid) {
  const names = content.runs.map(run => content.runs.length > 1 ? run.name : "");
  if (!content.stashes.some(stash => stash)) return;
  const card = add(grid, "div", {className: "card wide", id: "stash-factors"});
  add(card, "h3", {}, "Sufficient factors");
  content.stashes.forEach((stash, index) => {
    if (!stash) return;
    if (names[index]) add(card, "p", {className: "quiet"}, names[index]);
    stash.lines.forEach((_, line) => addText(card, "p", {}, () => content.stashes[index].lines[line]));
  });
  content.stashes.forEach((stash, index) => {
    if (stash && stash.timeline) addStashTimelines(grid, index, names[index]);
  });
}

// Pages in use by each layer after each pass of the schedule, stacked.
function addStashTimelines(grid, index, name) {
  const ofRun = name ? ` (${name})` : "", timeline = () => content.stashes[index].timeline;
  for (const tier of ["device", "host"].filter(tier => timeline()[tier + "_pages"] > 0)) {
    addPlot(grid, {
      id: `stash-${tier}` + ofRun, wide: true, height: 380,
      title: `Pages in use along the schedule, ${tier}` + ofRun,
      note: () => `After each forward and backward pass of the expert layers of rank ${timeline().rank}, whose pool was the ` +
            `fullest, in the fullest step so far, logged at step ${timeline().step}. Peak: ` +
            `${Math.max(...heldPages(timeline(), tier).totals).toLocaleString("en")} of ` +
            `${timeline()[tier + "_pages"].toLocaleString("en")} pages (dashed).`,
      draw: () => drawPages(timeline(), tier),
    });
  }
}

// Returns the pages in use after each pass, by layer and in total.
function heldPages(timeline, tier) {
  const layers = [...new Set(timeline.passes.map(Math.abs))].sort((one, other) => one - other);
  const places = range(timeline.passes.length + 1), held = layers.map(() => places.map(() => 0));
  timeline.changes.forEach(([place, layer, device, host]) => {
    held[layers.indexOf(layer)][place + 1] += tier === "device" ? device : host;
  });
  held.forEach(row => row.forEach((_, place) => { if (place) row[place] += row[place - 1]; }));
  return {layers, places, held, totals: places.map(place => held.reduce((sum, row) => sum + row[place], 0))};
}

function drawPages(timeline, tier) {
  const {layers, places, held, totals} = heldPages(timeline, tier), pages = timeline[tier + "_pages"];
  const kind = (pass, place) => pass > 0 ? "forward" : timeline.weights.includes(place) ? "weight gradients" : "backward";
  const words = ["begin", ...timeline.passes.map((pass, place) => `layer ${Math.abs(pass)}, ${kind(pass, place)}`)];
  const tint = index => layers.length <= 8 ? color(index) : `hsl(${Math.round(210 + 300 * index / layers.length) % 360} 60% 55%)`;
  return {
    traces: [
      // A layer whose backward directly follows its forward never uses pages.
      ...layers.map((layer, index) => ({
        x: places, y: held[index], name: `layer ${layer}`, type: "scatter", mode: "lines", stackgroup: "pages",
        line: {width: 0.5, color: tint(index), shape: "hv"}, fillcolor: tint(index), hoverinfo: layers.length > 8 ? "skip" : undefined,
        hovertemplate: layers.length > 8 ? undefined : "%{y}",
      })).filter(trace => trace.y.some(pages => pages > 0)),
      {x: places, y: totals, name: "all", type: "scatter", mode: "lines", line: {width: 1.5, color: css("--text"), shape: "hv"},
       text: words, hovertemplate: "%{y} after %{text}"},
    ],
    axes: {
      x: {title: "passes of expert layers, in order", range: [0, places.length - 1]}, legend: layers.length <= 16,
      y: {title: "pages", rangemode: "tozero", separatethousands: true},
      shapes: [{type: "line", xref: "paper", x0: 0, x1: 1, y0: pages, y1: pages, line: {color: css("--text"), width: 1.5, dash: "dash"}}],
    },
  };
}

const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["bytes", 1]];
function unitFor(bytes) { return SIZES.find(([_, size]) => bytes >= size) ?? SIZES[3]; }
function bytesText(bytes) {
  if (bytes === null || bytes === undefined) return "";
  const [unit, size] = unitFor(Math.abs(bytes));
  return `${(bytes / size).toLocaleString("en", {maximumSignificantDigits: 4})} ${unit}`;
}

// Predicted and measured memory by category: a table of the largest values, and bars for each pipeline stage.
function addMemory(grid, index, name) {
  const ofRun = name ? ` (${name})` : "", memory = () => content.memories[index];
  const card = add(grid, "div", {className: "card wide", id: "memory-kinds" + ofRun});
  add(card, "h3", {}, "Predicted and measured" + ofRun);
  addText(card, "p", {className: "quiet"}, () => memory().notes.join(" "));
  addTable(card, ["", "predicted", "measured", "difference", "measured, rank 0"],
           () => memory().rows.map(row => [row.name, row.predicted, row.measured, row.difference, row.first]), "scroll");
  if (!memory().stages.length) return;
  addPlot(grid, {
    id: "memory-stages" + ofRun, title: "Memory by category" + ofRun, wide: true, height: 380,
    note: "For each pipeline stage: predicted for the rank with the most memory; measured as the maximum over its ranks, by category.",
    draw: () => drawMemory(memory()),
  });
}

function drawMemory({kinds, stages, labels}) {
  const bars = stages.flatMap(stage => ["predicted", "measured"].filter(side => stage[side]).map(side => ({stage: stage.stage, side, bytes: stage[side]})));
  const totals = bars.map(bar => kinds.reduce((sum, kind) => sum + (bar.bytes[kind] ?? 0), 0));
  const [unit, size] = unitFor(Math.max(...totals));
  const places = [bars.map(bar => `stage ${bar.stage}`), bars.map(bar => bar.side)];
  return {
    traces: kinds.map((kind, index) => ({
      type: "bar", x: places, y: bars.map(bar => (bar.bytes[kind] ?? 0) / size), name: labels[kind], marker: {color: color(index)},
      customdata: bars.map(bar => bytesText(bar.bytes[kind] ?? 0)), hovertemplate: `%{customdata}<extra>${labels[kind]}</extra>`,
    })).filter(trace => trace.y.some(height => height > 0)),
    axes: {x: {title: "pipeline stage"}, y: {title: unit, rangemode: "tozero"}, legend: true, hover: "closest", barmode: "stack"},
  };
}

function addFigures() {
  const sections = [...new Set(content.figures.map(figure => figure.section))];
  if (content.memories.some(one => one) && !sections.includes("Memory")) sections.push("Memory");
  const nameOf = index => content.runs.length > 1 ? content.runs[index].name : "";
  for (const name of sections) {
    const grid = add(addSection(name), "div", {className: "grid"});
    if (name === "Expert memory") addStashes(grid);
    if (name === "Memory") content.memories.forEach((memory, index) => { if (memory) addMemory(grid, index, nameOf(index)); });
    content.figures.filter(figure => figure.section === name).forEach(figure => addFigure(grid, figure));
    if (name === "Communication") content.timelines.forEach((timeline, index) => {
      if (timeline) addTimeline(grid, index, nameOf(index));
    });
  }
  if (content.loads.some(one => one)) {
    const grid = add(addSection("Expert load"), "div", {className: "grid"});
    content.loads.forEach((one, index) => { if (one) addLoads(grid, index, nameOf(index)); });
  }
}

function addFlags() {
  const names = content.runs.length > 1 ? content.runs.map(run => run.name) : ["value"];
  if (content.environment.length) {
    addTable(addSection("Environment"), ["", ...names], () => content.environment.map(row => [row.name, ...row.values]), "card long");
  }
  if (!content.flags.length) return;
  const section = addSection("Flags"), choice = chosen("flags", {search: "", changed: false});
  const controls = add(section, "div", {className: "controls"});
  const search = add(controls, "input", {type: "search", placeholder: "search flags", ariaLabel: "search flags", value: choice.search});
  const label = add(controls, "label");
  const changed = add(label, "input", {type: "checkbox", checked: choice.changed});
  label.append(" only those that differ from the default");
  const count = add(controls, "span", {className: "quiet"});
  const body = addTable(section, ["name in files", ...names, "default"],
                        () => content.flags.map(flag => [flag.name, ...flag.values, flag.default]));
  const filter = () => {
    Object.assign(choice, {search: search.value, changed: changed.checked});
    const words = search.value.toLowerCase().replaceAll("-", "_").split(/\s+/);
    let shown = 0;
    content.flags.forEach((flag, index) => {
      const text = [flag.name, ...flag.values].join(" ").toLowerCase().replaceAll("-", "_");
      const visible = words.every(word => text.includes(word)) && (flag.set || !changed.checked);
      body.rows[index].hidden = !visible;
      body.rows[index].className = flag.set ? "set" : "same";
      shown += visible;
    });
    count.textContent = `${shown} of ${content.flags.length}`;
  };
  search.oninput = changed.onchange = filter;
  filter();
  updaters.push(filter);
}

// Describes which elements the page has; they are rebuilt when it changes.
function shapeOf(content) {
  const stashes = content.stashes.map(one => one && [one.lines.length, one.timeline && [one.timeline.device_pages > 0, one.timeline.host_pages > 0]]);
  return JSON.stringify([
    content.title, content.runs.map(run => [run.name, run.path, run.notes]), stashes,
    content.figures.map(figure => [figure.id, figure.section, figure.heat]),
    content.loads.map(one => one && [one.layers, one.num_experts]), content.timelines.map(one => one && one.rows.length),
    content.memories.map(one => one && one.stages.length), content.flags.length, content.environment.length,
  ]);
}

function take(now) {
  content = now;
  figures = new Map(content.figures.map(figure => [figure.id, figure]));
  loads = content.loads.map((one, index) => one && unpackNew(one, loads[index]));
  stepRange = rangeOfSteps();
}

// Creates all elements for the content that take() stored.
function build() {
  plots.forEach(plot => Plotly.purge(plot.element));
  plots.clear();
  updaters = [];
  main.replaceChildren();
  document.querySelector("nav").replaceChildren();
  addHead();
  addFigures();
  addFlags();
  // Every card has its final width only now.
  for (const plot of plots.values()) {
    redraw(plot);
    if (plot.stepAxis) plot.element.on("plotly_relayout", change => zoomAll(plot, change));
    if (plot.onClick) plot.element.on("plotly_click", plot.onClick);
  }
}

darkness.addEventListener("change", () => plots.forEach(redraw));
const inPage = document.getElementById("content");
if (inPage) {
  take(JSON.parse(inPage.textContent));
  build();
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}
