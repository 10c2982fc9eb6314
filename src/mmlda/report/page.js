"use strict";
(() => {
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;  // text, never markup: results may hold anything
    if (name) element.className = name;
    return element;
  };

  // Theme: the system's, until the reader chooses.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (value) => {
    try {
      if (value) localStorage.setItem("mmlda-theme", value);
      return localStorage.getItem("mmlda-theme");
    } catch { return null; }  // no storage for files in some browsers
  };
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  $("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    remembered(root.dataset.theme);
  });

  // Tables: numbers as numbers, words as words, cells without a value last either way.
  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    table.addEventListener("click", (event) => {
      const button = event.target.closest("button.sort");
      if (!button) return;
      const head = button.closest("th");
      const up = head.getAttribute("aria-sort") !== "ascending";
      const column = Number(button.dataset.column);
      for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [row, row.cells[column].dataset.sort]);
      const words = rows.some(([, value]) => value !== undefined && (value === "" || Number.isNaN(Number(value))));
      rows.sort(([, a], [, b]) => {
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = words ? a.localeCompare(b, "en") : Number(a) - Number(b);
        return up ? order : -order;
      });
      body.append(...rows.map(([row]) => row));
    });
  }

  // Tables wider than their place say that they scroll, until their end is in sight.
  for (const box of document.querySelectorAll(".scroll")) {
    const look = () => {
      const rest = box.scrollWidth - box.clientWidth;
      box.classList.toggle("wide", rest > 1);
      box.classList.toggle("end", box.scrollLeft >= rest - 1);
    };
    box.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(box);
  }

  // On paper nothing is folded.
  addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll("details")) fold.open = true; });

  // Gallery: tabs, with the arrow keys.
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const show = (tab, focus) => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      $(other.getAttribute("aria-controls")).classList.toggle("away", other !== tab);
    }
    if (focus) tab.focus();
  };
  tabs.forEach((tab, k) => {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: k + 1, ArrowLeft: k - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(tabs[to % tabs.length], true);
    });
  });
  if (tabs.length) {
    show(tabs[0]);
    const panels = [...document.querySelectorAll(".panel")];
    // Stored amplified; a contrast below 1 takes it back to its true size, linearly around grey.
    const amplify = (on) => {
      $("gain").setAttribute("aria-pressed", String(on));
      for (const panel of panels) {
        panel.classList.toggle("true-size", !on);
        for (const image of panel.querySelectorAll(".noise")) image.style.filter = on ? "" : `contrast(${1 / panel.dataset.gain})`;
      }
    };
    $("gain").hidden = panels.every((panel) => panel.dataset.gain === "1");
    $("gain").addEventListener("click", () => amplify($("gain").getAttribute("aria-pressed") !== "true"));
  }

  // Provenance: one dialog, filled from the block of data.
  const { pool, shared, results } = JSON.parse($("data").textContent);
  const labels = { part: "part of", place: "place", paper: "the paper", holds: "claim holds", n: "images", numbers: "also measured (shares of 1)", train_steps: "training steps", attack_steps: "steps of the attack",
    recipe_settings: "recipe", attack_settings: "attack", network_sha256: "SHA-256 of its weights",
    interval: "95% interval", name: "result file", outcomes: "outcomes, image by image" };
  const order = ["value", "interval", "paper", "difference", "holds", "note", "part", "place", "n", "seed", "train_steps", "attack_steps", "seconds",
    "numbers", "attack_settings", "recipe_settings", "network", "network_sha256", "data", "device", "versions", "commit", "name", "outcomes"];
  const tidy = (value) => typeof value === "number" ? String(Number(value.toPrecision(6))).replace("-", "−") : String(value);
  const written = (value) => {
    if (value === null || typeof value !== "object") return document.createTextNode(value === true ? "yes" : value === false ? "no" : tidy(value));
    if (Array.isArray(value)) return document.createTextNode(value.map((v) => typeof v === "object" ? JSON.stringify(v) : tidy(v)).join(" to "));
    const list = make("ul");
    for (const [key, part] of Object.entries(value)) {
      const item = make("li");
      item.append(make("span", key), " ", part !== null && typeof part === "object" ? JSON.stringify(part) : tidy(part));
      list.append(item);
    }
    return list;
  };
  const described = (result) => {
    const list = make("dl");
    for (const key of order) {
      if (!(key in result)) continue;
      let value = shared.includes(key) ? pool[result[key]] : result[key];
      if (key === "value" && result.unit) value = tidy(value) + (result.unit === "%" ? "%" : ` ${result.unit}`);
      if (key === "name") value += ".json";
      const row = make("div");
      const place = make("dd");
      place.append(written(value));
      row.append(make("dt", labels[key] || key), place);
      list.append(row);
    }
    return list;
  };
  const dialog = $("provenance");
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-results]");
    if (!button) return;
    const found = button.dataset.results.split(" ").map((id) => results[id]);
    const body = $("provenance-body");
    body.replaceChildren();
    if (found.length > 1) body.append(make("p", `${found.length} results.`));
    for (const result of found) {
      if (found.length === 1) {
        body.append(make("p", result.what, "what"), described(result));
        continue;
      }
      const details = make("details");
      const seed = result.seed === undefined ? "" : `, seed ${result.seed}`;
      details.append(make("summary", `${result.what}: ${result.value === undefined ? "–" : tidy(result.value)}${seed}`));
      details.addEventListener("toggle", () => { if (details.children.length === 1) details.append(described(result)); });
      body.append(details);
    }
    dialog.showModal();
    dialog.scrollTop = 0;
  });
  $("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });  // beside it
})();
