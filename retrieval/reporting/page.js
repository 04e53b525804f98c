// The page: rows, lists, map and dialog, built from the view in #view. Texts of the view reach the
// document as text nodes and attributes only.

(() => {
  const PAGE = 20;
  const CLASSES = 50; // that a click adds to the table
  const NAMED = { random: "Random", worst: "Worst", best: "Best", all: "All shown" };
  const byId = (id) => document.getElementById(id);
  const whole = (n) => n.toLocaleString("en-US");
  const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
  const percent = (share) => `${(100 * share).toFixed(1)}%`;
  const range = (n) => Array.from({ length: n }, (_, i) => i);

  function el(tag, props = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) {
      if (typeof value === "function") node.addEventListener(key, value);
      else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  }

  function later(act, wait = 120) {
    let timer = 0;
    return () => {
      clearTimeout(timer);
      timer = setTimeout(act, wait);
    };
  }

  /* What the view says of an item. */

  let view;
  let queryOf; // item -> query index

  const className = (c) => (c >= 0 ? String(view.classes.name[c]) : "–");
  const classOf = (item) => view.items.class[item];
  const nameOf = (item) => className(classOf(item));
  const pathOf = (item) => view.items.path[item] ?? `row ${view.items.row[item]}`;
  const shortOf = (item) => pathOf(item).split(/[\\/]/).filter(Boolean).pop() ?? pathOf(item);

  function scoreText(score) {
    if (score == null) return "";
    return view.distance === "cos" ? score.toFixed(3) : Number(score).toPrecision(3);
  }

  function rankText(rank) {
    if (rank === 0) return "nothing to find: no other item of its class";
    return rank === 1 ? "✓ right at rank 1" : `✗ nearest positive at rank ${whole(rank)}`;
  }

  const rankKind = (rank) => (rank === 1 ? "right" : rank === 0 ? "" : "wrong");

  /* Tiles: a picture or words in a frame, marked right or wrong. */

  function image(item) {
    const source = view.thumbs.images[view.items.thumb[item]];
    if (!source?.startsWith("data:image/")) return null;
    const side = view.thumbs.side;
    return el("img", { src: source, alt: "", width: side, height: side, loading: "lazy", decoding: "async" });
  }

  const picture = (item) => image(item) ?? el("span", { class: "words" }, el("span", {}, shortOf(item)));

  function tile(item, { kind = "", score, open = showDetail, caption } = {}) {
    const mark = { right: "✓", wrong: "✗" }[kind];
    const says = { right: "right", wrong: "wrong", query: "query" }[kind];
    const about = [nameOf(item), says, scoreText(score), pathOf(item)].filter(Boolean).join(", ");
    const title = [nameOf(item), pathOf(item), scoreText(score)].filter(Boolean).join("\n");
    const inside = [picture(item), mark && el("span", { class: "mark", "aria-hidden": "true" }, mark)];
    const link = kind !== "query" && queryOf.has(item);
    const frame = link
      ? el("button", { type: "button", class: "frame", title, "aria-label": `${about}: show its neighbours`, click: () => open(queryOf.get(item)) }, ...inside)
      : el("div", { class: "frame", title, role: "img", "aria-label": about }, ...inside);
    const below = caption ?? [el("span", { class: "score" }, scoreText(score)), el("span", { class: "class", title: nameOf(item) }, nameOf(item))];
    return el("figure", { class: `tile ${kind || "plain-tile"}` }, frame, below.length ? el("figcaption", {}, ...below) : null);
  }

  const queryTile = (item) => tile(item, { kind: "query", caption: [el("span", { class: "score" }, "query")] });

  function near(query, items, scores, open) {
    const kind = (item) => (classOf(item) === classOf(query) ? "right" : "wrong");
    return el("ol", { class: "near" }, ...items.map((item, n) => el("li", {}, tile(item, { kind: kind(item), score: scores?.[n], open }))));
  }

  function rowHead(item, rank) {
    return el("div", { class: "row-head" },
      el("span", { class: "class name" }, nameOf(item)),
      rank == null ? null : el("span", { class: `rank ${rankKind(rank)}` }, rankText(rank)),
      el("span", { class: "path", title: pathOf(item) }, pathOf(item)));
  }

  function queryRow(index, open) {
    const query = view.queries[index];
    return el("li", { class: "row", "data-query": index },
      rowHead(query.item, query.rank),
      el("div", { class: "line-up" }, queryTile(query.item), near(query.item, query.near, query.score, open)));
  }

  /* Lists that grow by a page. */

  function grow(list, entries, make, page = PAGE) {
    list.replaceChildren();
    list.parentElement.querySelector(":scope > .more")?.remove();
    let shown = 0;
    const button = el("button", { type: "button", class: "more", click: () => addPage(true) });
    function addPage(focus) {
      const next = entries.slice(shown, shown + page).map(make);
      list.append(...next);
      shown += next.length;
      button.textContent = `Show ${Math.min(page, entries.length - shown)} more of ${whole(entries.length - shown)}`;
      if (shown >= entries.length) button.remove();
      else if (!button.isConnected) list.after(button);
      if (focus) next[0]?.querySelector("button")?.focus({ preventScroll: true });
    }
    addPage(false);
  }

  /* Tabs by click and by arrow keys. */

  function makeTabs(box, names, panel, select) {
    const buttons = names.map(([id, label, count], n) =>
      el("button", { type: "button", role: "tab", id: `${box.id}-${id}`, "aria-controls": panel.id, click: () => pick(n) },
        label, count == null ? null : el("span", { class: "n" }, count)));
    function pick(n) {
      buttons.forEach((button, i) => {
        button.setAttribute("aria-selected", String(i === n));
        button.tabIndex = i === n ? 0 : -1;
      });
      panel.setAttribute("aria-labelledby", buttons[n].id);
      select(names[n][0]);
    }
    box.addEventListener("keydown", (event) => {
      const here = buttons.indexOf(document.activeElement);
      const step = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: names.length - 1 }[event.key];
      if (here < 0 || step === undefined) return;
      event.preventDefault();
      const next = (step + names.length) % names.length;
      pick(next);
      buttons[next].focus();
    });
    box.replaceChildren(...buttons);
    pick(0);
    return pick;
  }

  // Thousands of options are made only when someone wants them.
  function offerClasses(input, list, classes) {
    input.addEventListener("focus", () => {
      if (list.childElementCount) return;
      const names = [...new Set(classes().map(className))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      list.append(...names.map((name) => el("option", { value: name })));
    }, { once: true });
  }

  // A whole name picks that class; part of one picks all that contain it.
  function classMatcher(text) {
    const wanted = text.trim();
    if (!wanted) return () => true;
    if (view.classes.name.some((name) => String(name) === wanted)) return (c) => className(c) === wanted;
    const part = wanted.toLowerCase();
    return (c) => className(c).toLowerCase().includes(part);
  }

  /* Rows. */

  function startRows() {
    const every = { ...view.tabs, all: range(view.queries.length) };
    const tabs = Object.keys(NAMED).filter((id) => every[id]?.length);
    const [byClass, bySearch] = [byId("row-class"), byId("row-search")];
    let current = tabs[0];
    function matching(id) {
      const right = classMatcher(byClass.value);
      const text = bySearch.value.trim().toLowerCase();
      return every[id].filter((n) => {
        const { item } = view.queries[n];
        if (!right(classOf(item))) return false;
        return !text || pathOf(item).toLowerCase().includes(text) || nameOf(item).toLowerCase().includes(text);
      });
    }
    function update() {
      const found = matching(current);
      const filtered = byClass.value.trim() || bySearch.value.trim();
      const sample = view.total_queries > view.queries.length ? ` The page holds ${whole(view.queries.length)} of all ${whole(view.total_queries)}.` : "";
      byId("row-count").textContent = filtered
        ? `${whole(found.length)} of ${plural(every[current].length, "query", "queries")} match.${sample}`
        : `${plural(found.length, "query", "queries")}.${sample}`;
      grow(byId("row-list"), found, (n) => queryRow(n));
      if (!found.length) byId("row-list").append(nothing());
    }
    function nothing() {
      const others = current === "all" ? 0 : matching("all").length;
      const all = el("button", { type: "button", class: "plain", click: () => pick(tabs.indexOf("all")) }, `Look in all shown (${whole(others)})`);
      return el("li", { class: "empty" }, "No query matches. ", others ? all : null);
    }
    const pick = makeTabs(byId("row-tabs"), tabs.map((id) => [id, NAMED[id], whole(every[id].length)]), byId("row-panel"), (id) => {
      current = id;
      update();
    });
    offerClasses(byClass, byId("row-classes"), () => view.queries.map((query) => classOf(query.item)));
    for (const input of [byClass, bySearch]) input.addEventListener("input", later(update));
    return (name) => {
      byClass.value = name;
      bySearch.value = "";
      pick(tabs.indexOf("all"));
      byId("rows").scrollIntoView();
    };
  }

  /* Failures. */

  const COLUMNS = [
    { key: "name", title: "Class", text: true },
    { key: "recall", title: "Recall@1" },
    { key: "items", title: "Items" },
    { key: "spread", title: "Spread" },
    { key: "gap", title: "Gap" },
    { key: "nearest", title: "Nearest class", text: true },
  ];

  function sorted(order, { key, up }) {
    const column = view.classes[key];
    const value = (c) => (key === "nearest" ? (column[c] >= 0 ? className(column[c]) : null) : column[c]);
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    return [...order].sort((a, b) => {
      const [one, two] = [value(a), value(b)];
      if (one == null || two == null) return (one == null) - (two == null); // unknown comes last
      return (up ? 1 : -1) * compare(one, two) || view.classes.items[b] - view.classes.items[a];
    });
  }

  function meter(share) {
    if (share == null) return "–";
    return el("span", {}, el("span", { class: "meter", "aria-hidden": "true" }, el("i", { style: `width:${100 * share}%` })), percent(share));
  }

  function classCell(c, column, hasRows, filterRows) {
    const value = view.classes[column.key][c];
    if (column.key === "name" && hasRows.has(c)) {
      const link = el("button", { type: "button", class: "link", click: () => filterRows(className(c)) }, className(c));
      return el("td", { class: "text", title: `${className(c)}: show its queries` }, link);
    }
    if (column.key === "name") return el("td", { class: "text", title: className(c) }, className(c));
    if (column.key === "nearest") return el("td", { class: "text", title: className(value) }, className(value));
    if (column.key === "recall") return el("td", {}, meter(value));
    return el("td", {}, value == null ? "–" : column.key === "items" ? whole(value) : value.toPrecision(3));
  }

  function startClasses(filterRows) {
    const table = byId("class-table");
    const columns = COLUMNS.filter(({ key }) => view.classes[key].some((value) => value != null && value !== -1));
    const hasRows = new Set(filterRows ? view.queries.map((query) => classOf(query.item)) : []);
    const sort = { key: "recall", up: true };
    const heads = columns.map((column) => {
      const click = () => {
        sort.up = sort.key === column.key ? !sort.up : column.text || column.key === "recall" || column.key === "gap";
        sort.key = column.key;
        update();
      };
      return el("th", { scope: "col", class: column.text ? "text" : null }, el("button", { type: "button", click }, column.title));
    });
    const body = el("tbody");
    table.append(el("thead", {}, el("tr", {}, ...heads)), body);
    const list = el("div"); // carries the "more" button behind the table
    byId("class-count").after(list);
    let shown = 12;
    function update() {
      heads.forEach((head, n) => {
        if (columns[n].key === sort.key) head.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
        else head.removeAttribute("aria-sort");
      });
      const text = byId("class-search").value.trim().toLowerCase();
      const found = range(view.classes.name.length).filter((c) => className(c).toLowerCase().includes(text));
      const rows = sorted(found, sort).slice(0, shown);
      body.replaceChildren(...rows.map((c) => el("tr", {}, ...columns.map((column) => classCell(c, column, hasRows, filterRows)))));
      byId("class-count").textContent = `${whole(rows.length)} of ${plural(found.length, "class", "classes")}.`;
      const left = found.length - rows.length;
      const more = el("button", { type: "button", class: "more", click: showMore }, `Show ${whole(Math.min(CLASSES, left))} more of ${whole(left)}`);
      list.replaceChildren(...(left ? [more] : []));
    }
    function showMore() {
      shown += CLASSES;
      update();
      list.querySelector("button")?.focus({ preventScroll: true });
    }
    byId("class-search").addEventListener("input", later(() => { shown = 12; update(); }));
    update();
  }

  function couple([one, two, score], captions = false) {
    const caption = (item) => (captions ? [el("span", { class: "class", title: nameOf(item) }, nameOf(item))] : []);
    return el("div", { class: "couple" },
      tile(one, { caption: caption(one) }), tile(two, { caption: caption(two) }),
      el("span", { class: "caption" }, scoreText(score)));
  }

  function confusedCard({ a, b, count, share, examples }) {
    return el("li", { class: "card" },
      el("div", { class: "card-head" },
        el("span", { class: "names" }, el("bdi", {}, className(a)), el("span", { class: "arrow" }, " → "), el("bdi", {}, className(b))),
        el("span", { class: "share" }, `${whole(count)} · ${percent(share)}`)),
      el("div", { class: "examples" }, ...examples.map((example) => couple(example))));
  }

  function startFailures(filterRows) {
    startClasses(filterRows);
    if (byId("confused")) grow(byId("confused"), view.confused, confusedCard, 9);
    if (byId("duplicates")) grow(byId("duplicates"), view.duplicates, (pair) => el("li", { class: "card" }, couple(pair, true)), 15);
  }

  /* Spread: the dot under the pointer says its name. */

  function startSpread() {
    const chart = byId("spread").querySelector(".chart");
    const [left, right, bottom, top] = chart.dataset.plot.split(" ").map(Number);
    const { spread, gap } = view.classes;
    const x = (c) => left + (spread[c] / Number(chart.dataset.across)) * (right - left);
    const y = (c) => bottom + (gap[c] / Number(chart.dataset.up)) * (top - bottom);
    const known = range(spread.length).filter((c) => spread[c] != null && gap[c] != null);
    const [spot, note] = [chart.querySelector(".spot"), byId("spread-note")];
    const usual = note.textContent;
    const leave = () => {
      spot.setAttribute("visibility", "hidden");
      note.textContent = usual;
    };
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("pointermove", (event) => {
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      const away = (c) => (x(c) - place.x) ** 2 + (y(c) - place.y) ** 2;
      const best = known.reduce((a, b) => (away(b) < away(a) ? b : a));
      if (away(best) > 400) return leave();
      spot.setAttribute("cx", x(best));
      spot.setAttribute("cy", y(best));
      spot.setAttribute("visibility", "visible");
      note.textContent = `${className(best)}: spread ${spread[best].toPrecision(3)}, ${gap[best].toPrecision(3)} to ${className(view.classes.nearest[best])}`;
    });
  }

  /* Map. */

  // Few classes share out the circle of hues; of many, each keeps the hue of its name in any report.
  function hues(groups) {
    const distinct = [...new Set(groups)].sort((a, b) => a - b);
    const few = distinct.length <= 12;
    return new Map(distinct.map((c, n) => [c, few ? (360 * n) / distinct.length : hash(className(c)) % 360]));
  }

  function hash(text) {
    let h = 2166136261;
    for (const sign of text) h = Math.imul(h ^ sign.codePointAt(0), 16777619) >>> 0;
    return (Math.imul(h ^ (h >>> 15), 2246822519) >>> 0) % 3600;
  }

  function tipContent(query) {
    return [image(query.item), el("div", {},
      el("b", {}, nameOf(query.item)), el("span", {}, shortOf(query.item)), el("span", {}, rankText(query.rank)))].filter(Boolean);
  }

  function placeTip(tip, place) {
    const { offsetWidth: width, offsetHeight: height } = tip;
    const x = Math.max(4, Math.min(place.x + 14, place.width - width - 4));
    const y = place.y + 14 + height > place.height - 4 ? Math.max(4, place.y - height - 14) : place.y + 14;
    tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  }

  function mapHelp() {
    const keys = [["←↑↓→", "next point"], ["+ −", "zoom"], ["⇧ ←→", "pan"], ["Enter", "neighbours"], ["0", "whole map"]];
    return [
      el("p", { class: "note" }, matchMedia("(hover: none) and (pointer: coarse)").matches
        ? "Tap a point to see its neighbours; pinch to zoom."
        : "Hover over a point to see it, click it for its neighbours. Drag to pan; pinch or use the wheel to zoom."),
      el("div", { class: "keys-help" }, ...keys.flatMap(([key, what]) => [el("kbd", {}, key), el("span", {}, what)])),
    ];
  }

  function panelContent(query, open) {
    const item = query.item;
    return [
      el("div", { class: "head-tile" }, queryTile(item),
        el("div", {}, el("h3", {}, nameOf(item)), el("div", { class: "path" }, pathOf(item)), el("div", { class: "note" }, rankText(query.rank)))),
      near(item, query.near, query.score, open),
    ];
  }

  function startMap() {
    const shown = view.map.query;
    const queries = shown.map((n) => view.queries[n]);
    const group = queries.map((query) => classOf(query.item));
    const hue = hues(group);
    const pointOf = new Map(shown.map((query, point) => [query, point]));
    const [canvas, panel, tip, say, colourBy] = ["map-canvas", "map-panel", "map-tip", "map-say", "map-colour"].map(byId);
    let paint = {};

    function readPaint() {
      const style = getComputedStyle(byId("map"));
      const probe = el("i", { hidden: true });
      byId("map").append(probe);
      const read = (name) => {
        probe.style.color = `var(${name})`;
        return getComputedStyle(probe).color;
      };
      const tone = theme.now() === "dark" ? "62% 66%" : "58% 43%";
      const classes = new Map([...hue].map(([c, h]) => [c, `hsl(${h} ${tone})`]));
      paint = { ink: style.color, right: read("--right"), wrong: read("--wrong"), none: read("--muted"), classes };
      probe.remove();
    }

    const resultColour = (rank) => (rank === 1 ? paint.right : rank === 0 ? paint.none : paint.wrong);
    const openThere = (n) => (pointOf.has(n) ? map.choose(pointOf.get(n)) : showDetail(n));
    const hideHint = later(() => { byId("map-hint").hidden = true; }, 1600);
    const map = createMap(canvas, { x: view.map.x, y: view.map.y, group, filled: queries.map((query) => query.rank === 1) }, {
      colour: (n) => (colourBy.value === "class" ? paint.classes.get(group[n]) : resultColour(queries[n].rank)),
      ink: () => paint.ink,
      links: (n) => queries[n].near.map((item) => pointOf.get(queryOf.get(item))).filter((point) => point !== undefined),
      hint: () => {
        byId("map-hint").hidden = false;
        hideHint();
      },
      hover: (n, place) => {
        tip.hidden = n < 0;
        if (n < 0) return;
        if (tip.dataset.point !== String(n)) {
          tip.dataset.point = n;
          tip.replaceChildren(...tipContent(queries[n]));
          say.textContent = `${nameOf(queries[n].item)}, ${rankText(queries[n].rank)}`;
        }
        placeTip(tip, place);
      },
      choose: (n) => panel.replaceChildren(...(n < 0 ? mapHelp() : panelContent(queries[n], openThere))),
    });

    function light() {
      const wanted = byId("map-class").value.trim();
      const index = wanted ? view.classes.name.findIndex((name, c) => String(name) === wanted && hue.has(c)) : -1;
      map.light(index);
    }

    offerClasses(byId("map-class"), byId("map-classes"), () => [...hue.keys()]);
    byId("map-class").addEventListener("input", later(light));
    colourBy.addEventListener("change", map.redraw);
    for (const button of document.querySelectorAll("[data-zoom]"))
      button.addEventListener("click", () => ({ in: () => map.zoom(1.6), out: () => map.zoom(1 / 1.6), reset: map.reset })[button.dataset.zoom]());
    readPaint();
    theme.onChange(() => {
      readPaint();
      map.redraw();
    });
    panel.replaceChildren(...mapHelp());
  }

  /* Comparison: queries that flipped, side by side. */

  function flipRow(flip, file) {
    const side = (title, rank, items, scores) => el("div", {}, el("h4", {}, `${title}: ${rankText(rank)}`), near(flip.item, items, scores));
    return el("li", { class: "row" }, rowHead(flip.item),
      el("div", { class: "line-up" }, queryTile(flip.item),
        el("div", { class: "versus" }, side(view.title, flip.rank, flip.ours, flip.score), side(file, flip.their_rank, flip.theirs, flip.their_score))));
  }

  function startFlips(box) {
    const index = Number(box.dataset.compare);
    const { file, flips } = view.compare[index];
    const kinds = [["gained", "Gained"], ["lost", "Lost"]]
      .map(([kind, label]) => [kind, label, flips.filter((flip) => flip.kind === kind)])
      .filter(([, , found]) => found.length);
    if (!kinds.length) return;
    const tabs = el("div", { id: `flip-tabs-${index}`, class: "tabs", role: "tablist", "aria-label": "Queries that flipped" });
    const list = el("ul", { class: "rows" });
    const panel = el("div", { id: `flip-panel-${index}`, role: "tabpanel" }, list);
    box.append(tabs, panel);
    const count = (kind, found) => (view.compare[index][kind] > found.length ? `${whole(found.length)} of ${whole(view.compare[index][kind])}` : whole(found.length));
    const names = kinds.map(([kind, label, found]) => [kind, label, count(kind, found)]);
    makeTabs(tabs, names, panel, (kind) => grow(list, kinds.find(([id]) => id === kind)[2], (flip) => flipRow(flip, file), 6));
  }

  /* Dialog: one query and its neighbours, with a way back. */

  const trail = [];

  function showDetail(index) {
    trail.push(index);
    drawDetail();
    if (!byId("detail").open) byId("detail").showModal();
  }

  function drawDetail() {
    const index = trail[trail.length - 1];
    byId("detail-title").textContent = nameOf(view.queries[index].item);
    byId("detail-back").hidden = trail.length < 2;
    byId("detail-body").replaceChildren(el("ul", {}, queryRow(index)));
  }

  function startDetail() {
    const dialog = byId("detail");
    byId("detail-close").addEventListener("click", () => dialog.close());
    byId("detail-back").addEventListener("click", () => {
      trail.pop();
      drawDetail();
      byId("detail-close").focus();
    });
    dialog.addEventListener("close", () => { trail.length = 0; });
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  /* Paper shows what is folded. */

  function startPrint() {
    let opened = [];
    addEventListener("beforeprint", () => {
      opened = [...document.querySelectorAll("details:not([open])")];
      for (const one of opened) one.open = true;
    });
    addEventListener("afterprint", () => {
      for (const one of opened) one.open = false;
    });
  }

  function startNavigation() {
    const links = new Map([...document.querySelectorAll(".bar a")].map((a) => [a.hash.slice(1), a]));
    const watch = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries)
        if (isIntersecting) {
          for (const link of links.values()) link.removeAttribute("aria-current");
          links.get(target.id)?.setAttribute("aria-current", "true");
        }
    }, { rootMargin: "-15% 0px -80% 0px" });
    for (const part of document.querySelectorAll("main > *")) watch.observe(part);
  }

  function start() {
    view = JSON.parse(byId("view").textContent);
    queryOf = new Map(view.queries.map((query, n) => [query.item, n]));
    document.body.classList.toggle("no-images", !view.thumbs.images.length);
    startDetail();
    const filterRows = byId("rows") ? startRows() : null;
    if (byId("fails")) startFailures(filterRows);
    if (byId("spread")) startSpread();
    if (byId("map")) startMap();
    document.querySelectorAll(".flips").forEach(startFlips);
    startPrint();
    startNavigation();
    document.documentElement.dataset.ready = "";
  }

  addEventListener("DOMContentLoaded", start);
})();
