// The map: points on a canvas with zoom, pan, hover, choice and keys. It knows nothing of the page.

const MAP_MARGIN = 28;
const MAP_ZOOM = [1, 60];
const MAP_REACH = { mouse: 10, touch: 22 };

/* points: {x, y, group, filled}, columns of equal length, x and y in 0..1.
   on: {colour(n), ink(), hover(n, place), choose(n), hint(), links(n)} */
function createMap(canvas, points, on) {
  const context = canvas.getContext("2d");
  const size = points.x.length;
  const at = { zoom: 1, x: 0, y: 0 };
  const state = { hover: -1, chosen: -1, group: -1, width: 0, height: 0, waiting: false };
  const fingers = new Map();
  let moved = 0;

  const side = () => Math.min(state.width, state.height) - 2 * MAP_MARGIN;
  const placeX = (n) => state.width / 2 + at.x + (points.x[n] - 0.5) * side() * at.zoom;
  const placeY = (n) => state.height / 2 + at.y + (points.y[n] - 0.5) * side() * at.zoom;

  function redraw() {
    if (state.waiting) return;
    state.waiting = true;
    requestAnimationFrame(() => {
      state.waiting = false;
      draw();
    });
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(state.width * ratio), Math.round(state.height * ratio)];
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, state.width, state.height);
    drawLinks();
    drawPoints();
    for (const n of [state.chosen, state.hover]) if (n >= 0) drawSpot(n);
  }

  function drawLinks() {
    if (state.chosen < 0) return;
    context.strokeStyle = on.ink();
    context.globalAlpha = 0.45;
    context.lineWidth = 1;
    for (const n of on.links(state.chosen)) {
      context.beginPath();
      context.moveTo(placeX(state.chosen), placeY(state.chosen));
      context.lineTo(placeX(n), placeY(n));
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  function litGroup() {
    if (state.hover >= 0) return points.group[state.hover];
    if (state.chosen >= 0) return points.group[state.chosen];
    return state.group;
  }

  function drawPoints() {
    const lit = litGroup();
    const room = Math.max(0.7, Math.min(1, Math.sqrt(side() / 480)));
    const radius = Math.min(7, (size > 1200 ? 2.6 : size > 300 ? 3.4 : 4.4) * room * at.zoom ** 0.3);
    for (const front of lit < 0 ? [true] : [false, true]) {
      context.globalAlpha = front ? 0.92 : 0.16;
      for (let n = 0; n < size; n++) {
        if (lit >= 0 && (points.group[n] === lit) !== front) continue;
        drawPoint(n, front && lit >= 0 ? radius + 1.2 : radius);
      }
    }
    context.globalAlpha = 1;
  }

  function drawPoint(n, radius) {
    const [x, y] = [placeX(n), placeY(n)];
    if (x < -9 || y < -9 || x > state.width + 9 || y > state.height + 9) return;
    context.beginPath();
    context.arc(x, y, points.filled[n] ? radius : radius - 0.4, 0, 7);
    if (points.filled[n]) {
      context.fillStyle = on.colour(n);
      context.fill();
    } else {
      context.strokeStyle = on.colour(n);
      context.lineWidth = 1.5;
      context.stroke();
    }
  }

  function drawSpot(n) {
    context.beginPath();
    context.arc(placeX(n), placeY(n), 9, 0, 7);
    context.strokeStyle = on.ink();
    context.lineWidth = n === state.chosen ? 2.5 : 1.5;
    context.stroke();
  }

  function keepInside() {
    const limit = (side() * at.zoom) / 2;
    at.x = Math.max(-limit, Math.min(limit, at.x));
    at.y = Math.max(-limit, Math.min(limit, at.y));
    canvas.classList.toggle("zoomed", at.zoom > 1.01);
  }

  function zoomBy(factor, x = state.width / 2, y = state.height / 2) {
    const zoom = Math.max(MAP_ZOOM[0], Math.min(MAP_ZOOM[1], at.zoom * factor));
    const share = zoom / at.zoom;
    at.x = x - state.width / 2 - (x - state.width / 2 - at.x) * share;
    at.y = y - state.height / 2 - (y - state.height / 2 - at.y) * share;
    at.zoom = zoom;
    keepInside();
    showHover();
  }

  function panBy(x, y) {
    at.x += x;
    at.y += y;
    keepInside();
    showHover();
  }

  function reset() {
    Object.assign(at, { zoom: 1, x: 0, y: 0 });
    keepInside();
    showHover();
  }

  function nearest(x, y, reach) {
    let [best, least] = [-1, reach * reach];
    for (let n = 0; n < size; n++) {
      const away = (placeX(n) - x) ** 2 + (placeY(n) - y) ** 2;
      if (away < least) [best, least] = [n, away];
    }
    return best;
  }

  // The next point in a direction: near along it counts once, beside it three times.
  function neighbourTowards(from, dx, dy) {
    let [best, least] = [from, Infinity];
    for (let n = 0; n < size; n++) {
      const [x, y] = [placeX(n) - placeX(from), placeY(n) - placeY(from)];
      const along = x * dx + y * dy;
      const beside = Math.abs(x * dy) + Math.abs(y * dx);
      if (along <= 0.01 || beside > 2 * along || along + 3 * beside >= least) continue;
      [best, least] = [n, along + 3 * beside];
    }
    return best;
  }

  function bringInto(n) {
    const edge = 24;
    const [x, y] = [placeX(n), placeY(n)];
    at.x += Math.max(edge - x, 0) - Math.max(x - state.width + edge, 0);
    at.y += Math.max(edge - y, 0) - Math.max(y - state.height + edge, 0);
  }

  function showHover() {
    canvas.classList.toggle("over", state.hover >= 0);
    const n = state.hover;
    on.hover(n, n < 0 ? null : { x: placeX(n), y: placeY(n), width: state.width, height: state.height });
    redraw();
  }

  function hover(n, keyboard = false) {
    if (n === state.hover) return;
    state.hover = n;
    if (keyboard && n >= 0) bringInto(n);
    showHover();
  }

  function choose(n) {
    state.chosen = n;
    on.choose(n);
    redraw();
  }

  function spot(event) {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  const reachOf = (event) => (event.pointerType === "touch" ? MAP_REACH.touch : MAP_REACH.mouse);

  function onDown(event) {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, spot(event));
    if (fingers.size === 1) moved = 0;
  }

  function onMove(event) {
    const now = spot(event);
    const before = fingers.get(event.pointerId);
    if (!before) {
      if (event.pointerType !== "touch") hover(nearest(now.x, now.y, MAP_REACH.mouse));
      return;
    }
    moved += Math.hypot(now.x - before.x, now.y - before.y);
    if (fingers.size === 2) pinch(event.pointerId, before, now);
    else if (moved > 4) panBy(now.x - before.x, now.y - before.y);
    canvas.classList.toggle("drag", moved > 4);
    fingers.set(event.pointerId, now);
  }

  function pinch(id, before, now) {
    const other = [...fingers].find(([key]) => key !== id)[1];
    const gap = (place) => Math.max(8, Math.hypot(place.x - other.x, place.y - other.y));
    zoomBy(gap(now) / gap(before), (now.x + other.x) / 2, (now.y + other.y) / 2);
    panBy((now.x - before.x) / 2, (now.y - before.y) / 2);
  }

  function onUp(event) {
    const here = fingers.get(event.pointerId);
    fingers.delete(event.pointerId);
    canvas.classList.remove("drag");
    if (!here || moved > 4 || event.type === "pointercancel") return;
    const n = nearest(here.x, here.y, reachOf(event));
    hover(n);
    choose(n);
  }

  function onWheel(event) {
    if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) {
      on.hint();
      return;
    }
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 20 : 1;
    const { x, y } = spot(event);
    zoomBy(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.008 : 0.002)), x, y);
  }

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  function onArrow(event, [dx, dy]) {
    if (event.shiftKey) return panBy(-60 * dx, -60 * dy);
    const from = state.hover >= 0 ? state.hover : state.chosen;
    if (from < 0) return hover(nearest(state.width / 2, state.height / 2, Infinity), true);
    return hover(neighbourTowards(from, dx, dy), true);
  }

  function zoomHere(factor) {
    const n = state.hover >= 0 ? state.hover : state.chosen;
    if (n >= 0) zoomBy(factor, placeX(n), placeY(n));
    else zoomBy(factor);
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "+": () => zoomHere(1.5),
      "=": () => zoomHere(1.5),
      "-": () => zoomHere(1 / 1.5),
      0: reset,
      Enter: () => choose(state.hover),
      " ": () => choose(state.hover),
      Escape: () => {
        hover(-1);
        choose(-1);
      },
    };
    const act = ARROWS[event.key] ? () => onArrow(event, ARROWS[event.key]) : actions[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  canvas.addEventListener("pointerdown", onDown);
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerup", onUp);
  canvas.addEventListener("pointercancel", onUp);
  canvas.addEventListener("pointerleave", () => fingers.size || hover(-1));
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("blur", () => hover(-1));
  new ResizeObserver(([entry]) => {
    state.width = entry.contentRect.width;
    state.height = entry.contentRect.height;
    keepInside();
    showHover();
  }).observe(canvas);
  window.addEventListener("resize", redraw); // a zoomed page has another resolution

  return {
    redraw,
    reset,
    choose,
    zoom: (factor) => zoomBy(factor),
    light: (group) => {
      state.group = group;
      redraw();
    },
  };
}
