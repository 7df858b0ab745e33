"use strict";
// Keeps the page of a run in progress up to date: requests changes since the displayed version from the server.
const EVERY_MS = 2000, PATIENCE_MS = 15000;
const status = document.getElementById("live");
const visible = new IntersectionObserver(seen, {rootMargin: "300px"});
const inView = new Set();
let version = null, shape = "", lastChange = null, known = {}, timer = null, isAsking = false;

// Inverse of changes() in report_server.py.
function applied(old, change) {
  if (change === null) return old;
  const [kind, inner, more] = change;
  if (kind === "=") return inner;
  for (const [key, one] of Object.entries(inner)) old[key] = applied(old[key], one);
  if (kind === "[") old.push(...more);
  return old;
}

function seen(entries) {
  for (const entry of entries) {
    const plot = [...plots.values()].find(plot => plot.element === entry.target);
    if (!entry.isIntersecting) inView.delete(entry.target);
    else inView.add(entry.target);
    if (plot && entry.isIntersecting && plot.isStale) redraw(plot);
  }
}

// Figures outside the window are drawn when they are scrolled into it.
function refresh() {
  updaters.forEach(update => update());
  for (const plot of plots.values()) {
    plot.isStale = true;
    if (inView.has(plot.element)) redraw(plot);
  }
}

// Recreates all elements and keeps the scroll position relative to the card at the top.
function rebuild() {
  const top = [...document.querySelectorAll(".card[id], section")].reverse()
    .find(element => element.getBoundingClientRect().top <= window.innerHeight / 3);
  const id = top?.id, place = top?.getBoundingClientRect().top;
  const isAtTop = window.scrollY === 0;
  visible.disconnect();
  inView.clear();
  build();
  plots.forEach(plot => visible.observe(plot.element));
  const now = id && document.getElementById(id);
  if (now && !isAtTop) window.scrollBy(0, now.getBoundingClientRect().top - place);
}

function show(now) {
  const waits = now.waits.join("; ");
  if (!now.figures) {
    document.querySelector("h1").textContent = "Waiting for the first step";
    document.getElementById("about").textContent = waits;
    main.replaceChildren();
    shape = "";
    return;
  }
  take(now);
  if (shapeOf(now) === shape) return refresh();
  shape = shapeOf(now);
  rebuild();
  if (waits) add(document.getElementById("about"), "p", {className: "quiet"}, waits);
}

function tell(problem) {
  const ago = lastChange === null ? "" : `${Math.round((Date.now() - lastChange) / 1000)} s ago`;
  const last = content === null ? "" : `step ${Math.max(0, ...content.runs.map(run => run.last_step)).toLocaleString("en")}, `;
  status.textContent = problem || `live: ${last}${ago}`;
  status.className = problem ? "bad" : "quiet";
}

async function ask() {
  const query = version === null ? "" : "?since=" + encodeURIComponent(version);
  const response = await fetch("content.json" + query, {cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)});
  if (!response.ok) throw new Error(`the server returned status ${response.status}`);
  const answer = await response.json();
  if (answer.version !== version) {
    known = "content" in answer ? answer.content : applied(known, answer.changes);
    version = answer.version;
    lastChange = Date.now();
    show(known);
  }
}

async function follow() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  let problem = "";
  try {
    if (!document.hidden || version === null) await ask();
  } catch (error) {
    problem = `no answer from the server (${error.message}): the page shows the last data received; retrying`;
    version = null;
  }
  tell(problem);
  isAsking = false;
  timer = setTimeout(follow, EVERY_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
follow();
