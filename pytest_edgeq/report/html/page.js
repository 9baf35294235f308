"use strict";
(() => {
  // --- charts: drawn when they can be seen, because a page of many models has hundreds ---------

  const drawn = new Set();
  const touches = matchMedia("(pointer: coarse)").matches;

  function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  async function draw(plot) {
    drawn.add(plot);
    plot.replaceChildren();
    const views = await Bokeh.embed.embed_item(await unpacked(plot.dataset.chart), plot);
    if (touches) {
      // A finger that drags scrolls the page; the toolbar turns zooming on.
      for (const view of views) {
        for (const tool of view.model.toolbar?.tools ?? []) {
          if (tool.type === "BoxZoomTool") tool.active = false;
        }
      }
    }
    plot.dataset.drawn = "";
  }

  // Tooltips follow a mouse; a finger has left the chart when it has tapped.
  document.addEventListener("click", (event) => {
    const [target] = event.composedPath();
    if (!touches || !event.target.closest?.("[data-chart]")) return;
    const { clientX, clientY } = event;
    target.dispatchEvent(new PointerEvent("pointermove", {
      // Without a view it has no place on the page.
      clientX, clientY, view: window, isPrimary: true, pointerType: "mouse",
    }));
  });

  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && !drawn.has(target)) draw(target);
    }
  }, { rootMargin: "300px" });
  for (const plot of document.querySelectorAll("[data-chart]")) seen.observe(plot);

  // Colours of axes are read from the style sheet when a chart is painted.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of drawn) draw(plot);
  });

  // --- sections ---------------------------------------------------------------------------------

  function openLinked() {
    const section = document.getElementById(location.hash.slice(1));
    if (section instanceof HTMLDetailsElement) {
      section.open = true;
      section.scrollIntoView();
    }
  }
  addEventListener("hashchange", openLinked);
  for (const link of document.querySelectorAll('a[href^="#m"]')) {
    // A second click on the same link changes no hash.
    link.addEventListener("click", () => setTimeout(openLinked));
  }
  openLinked();

  for (const section of document.querySelectorAll("[data-outputs]")) {
    const pairs = section.querySelectorAll(".pair");
    section.querySelector("select")?.addEventListener("change", (event) => {
      pairs.forEach((pair, i) => { pair.hidden = i !== Number(event.target.value); });
    });
  }

  // --- tables -----------------------------------------------------------------------------------

  function valueOf(row, column) {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent.trim();
    if (text === "" || text === "–") return null;
    const number = Number({ inf: "Infinity", "-inf": "-Infinity", nan: "-Infinity" }[text] ?? text);
    return Number.isNaN(number) ? text : number;
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b || 0;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  function sortBy(table, heading) {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [valueOf(row, heading.cellIndex), row]);
    keyed.sort(([a], [b]) => {
      // What was not measured comes last in both directions.
      if (a === null || b === null) return (a === null) - (b === null);
      return descending ? compare(b, a) : compare(a, b);
    });
    body.append(...keyed.map(([, row]) => row));
  }

  for (const heading of document.querySelectorAll("[data-sort]")) {
    const cell = heading.closest("th");
    heading.addEventListener("click", () => sortBy(cell.closest("table"), cell));
  }

  function matches(control, row) {
    const wanted = control.value.trim().toLowerCase();
    if (wanted === "") return true;
    const texts = control.dataset.filter.split(" ").map((column) => {
      const cell = row.cells[column];
      return (cell.dataset.value ?? cell.textContent).trim().toLowerCase();
    });
    const isChoice = control instanceof HTMLSelectElement;
    return texts.some((text) => (isChoice ? text === wanted : text.includes(wanted)));
  }

  for (const part of document.querySelectorAll("[data-table]")) {
    const controls = [...part.querySelectorAll("[data-filter]")];
    const rows = [...part.querySelector("tbody").rows];
    const count = part.querySelector("[data-count]");
    const apply = () => {
      for (const row of rows) row.hidden = !controls.every((control) => matches(control, row));
      const shown = rows.filter((row) => !row.hidden).length;
      count.value = `${shown} of ${rows.length} ${count.dataset.count}`;
    };
    for (const control of controls) control.addEventListener("input", apply);
    apply();
  }
})();
