"use strict";
// Draws the figures that are embedded in the page, in its light or dark colors. Other scripts draw theirs with
// themed() and plotConfig().
const darkness = matchMedia("(prefers-color-scheme: dark)");

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Adds the page's colors, fonts and margins to a plotly layout.
function themed(layout) {
  const line = css("--line"), isNarrow = window.innerWidth < 600;
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true};
  const themedAxis = own => ({...axis, ...own, title: {standoff: 8, ...own?.title}});
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: css("--text"), size: isNarrow ? 11 : 12},
    hoverlabel: {bgcolor: css("--card"), font: {color: css("--text")}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: css("--quiet"), activecolor: css("--accent")},
    showlegend: false, hovermode: "closest",
    ...layout,
    margin: {l: 56, r: 12, t: 8, b: 44, ...layout.margin},
    xaxis: themedAxis({...(isNarrow ? {nticks: 5} : {}), ...layout.xaxis}), yaxis: themedAxis(layout.yaxis),
  };
}

function plotConfig() {
  return {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
          displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false};
}

const embedded = [...document.querySelectorAll(".plot > script")].map(script => {
  const element = script.parentElement, figure = JSON.parse(script.textContent);
  script.remove();
  return {element, figure};
});

function drawEmbedded() {
  for (const {element, figure: {data, layout}} of embedded) {
    // Keeps labels readable where lines cross them.
    const annotations = layout.annotations?.map(label => ({bgcolor: css("--card"), ...label}));
    Plotly.react(element, data, themed({...layout, annotations}), plotConfig());
  }
}

darkness.addEventListener("change", drawEmbedded);
drawEmbedded();
