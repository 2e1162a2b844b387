// A line chart, drawn by uPlot: at most twice a second, and only while it is in sight.

import { html, useEffect, useRef, useState } from '../../vendor/preact.js';
import uPlot from '../../vendor/uplot.js';
import { alignCurves, findLastValue, placeLabels, smoothValues } from '../curves.js';
import { significant, tickLabels } from '../format.js';
import { palette } from '../theme.js';

const DRAW_EVERY_MS = 500;
const COLORS = 8;
/** Lines for the labels of marks, of which neighbors do not overlap. */
const MARK_LINES = 4;

/**
 * @typedef {object} Curve
 * @property {string} name
 * @property {string} color Name of a custom property of the style sheet, such as `--c1`.
 * @property {(number | null)[]} x
 * @property {(number | null)[]} y
 * @property {boolean} [dots] True for few points, such as evaluations: each is shown, none is smoothed.
 */

/** @typedef {{ at: number, text?: string, kind: 'attempt' | 'action' | 'repair' }} Mark */

/** @param {number} index @returns {string} Color of the curve of this number. */
export const colorOf = (index) => `--c${(index % COLORS) + 1}`;

/**
 * A canvas knows no custom properties and no `light-dark()`: an element resolves them.
 * @param {string} name
 */
function resolveColor(name) {
  const probe = document.body.appendChild(Object.assign(document.createElement('i'), { hidden: true }));
  probe.style.color = `var(${name})`;
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

/**
 * @param {{
 *   title: string, curves: Curve[], smoothing?: number, logScale?: boolean, shape?: '' | 'wide' | 'tall' | 'flat',
 *   marks?: Mark[], format?: (value: number | null | undefined) => string, position?: (x: number) => string,
 *   ticks?: (x: number) => string, group?: string, extent?: [number, number] | null, zoom?: [number, number] | null,
 *   onZoom?: (range: [number, number] | null) => void, actions?: any,
 * }} props `extent`: horizontal range of all charts of the page, so that the same step is at the same place in each.
 */
export function LineChart({
  title,
  curves,
  smoothing = 0,
  logScale = false,
  shape = '',
  marks = [],
  format = significant,
  position = (x) => `step ${Math.round(x).toLocaleString('en-US')}`,
  ticks,
  group = 'page',
  extent = null,
  zoom = null,
  onZoom,
  actions,
}) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [cursorIndex, setCursorIndex] = useState(/** @type {number | null} */ (null));
  const chart = useRef(/** @type {Drawing | null} */ (null));
  const shownZoom = useRef(String(zoom));
  const colors = palette.value;
  // Smoothed curves are drawn over their points.
  const drawnCurves = curves.flatMap((curve) =>
    smoothing > 0 && !curve.dots
      ? [
          { ...curve, faint: true },
          { ...curve, y: smoothValues(curve.y, smoothing) },
        ]
      : [curve],
  );
  const { x, ys } = alignCurves(drawnCurves);
  const appearance = JSON.stringify([
    colors,
    logScale,
    shape,
    drawnCurves.map((curve) => [curve.name, curve.color, curve.dots, 'faint' in curve]),
  ]);

  useEffect(() => {
    const drawing = new Drawing(/** @type {HTMLElement} */ (box.current), {
      shown: drawnCurves,
      logScale,
      isWide: shape === 'wide',
      group,
      ticks,
      onCursor: setCursorIndex,
    });
    chart.current = drawing;
    drawing.onZoom = onZoom;
    drawing.showData([x, ...ys], marks, zoom ?? extent, true);
    return () => drawing.destroy();
  }, [appearance]);
  useEffect(() => {
    if (!chart.current) return;
    chart.current.onZoom = onZoom;
    const zoomText = String(zoom);
    chart.current.showData([x, ...ys], marks, zoom ?? extent, zoomText !== shownZoom.current);
    shownZoom.current = zoomText;
  });

  const index = cursorIndex ?? x.length - 1;
  const values = drawnCurves.flatMap((curve, number) =>
    'faint' in curve ? [] : [{ ...curve, value: findLastValue(ys[number], index) }],
  );
  return html`<figure
    class=${`chart ${shape}`}
    aria-label=${`${title}: ${values.map((curve) => `${curve.name} ${format(curve.value)}`).join(', ')}`}
  >
    <header>
      <h2>${title}</h2>
      <div class="vals">
        ${cursorIndex != null && x[cursorIndex] != null && html`<span>${position(x[cursorIndex])}</span>`}
        ${values.length <= 3 &&
        values.map(
          (curve) => html`<span style=${{ '--k': `var(${curve.color})` }}>
            ${values.length > 1 && html`<i></i>${curve.name} `}
            <b>${format(curve.value)}</b>
          </span>`,
        )}
      </div>
      ${actions}
    </header>
    <div class="plot" ref=${box}></div>
  </figure>`;
}

/** Distances between the ticks of the horizontal axis. */
const TICK_DISTANCES = Array.from({ length: 24 }, (_, index) => 10 ** (index - 9)).flatMap((unit) => [
  unit,
  2 * unit,
  2.5 * unit,
  5 * unit,
]);
const WHOLE_TICK_DISTANCES = TICK_DISTANCES.filter(Number.isInteger);

/** The canvas of a chart. Data that arrives faster than it is drawn, or out of sight, waits. */
class Drawing {
  /**
   * @param {HTMLElement} box
   * @param {{
   *   shown: any[], logScale: boolean, isWide: boolean, group: string, ticks: ((x: number) => string) | undefined,
   *   onCursor: (index: number | null) => void,
   * }} options
   */
  constructor(box, { shown, logScale, isWide, group, ticks, onCursor }) {
    /** @type {any[]} */
    this.data = [[], ...shown.map(() => [])];
    /** @type {Mark[]} */
    this.marks = [];
    /** Horizontal range to show; null: that of the data. @type {[number, number] | null} */
    this.range = null;
    /** @type {((range: [number, number] | null) => void) | undefined} */
    this.onZoom = undefined;
    this.isInSight = false;
    this.isStale = true;
    this.drawnAt = -Infinity;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.marksColors = {
      attempt: resolveColor('--bad'),
      action: resolveColor('--violet'),
      repair: resolveColor('--warn'),
    };
    this.surface = resolveColor('--surface');
    this.isWide = isWide;
    const ink = resolveColor('--faint');
    const grid = resolveColor('--grid');
    const family = getComputedStyle(document.body).fontFamily;
    const axis = { stroke: ink, font: `11px ${family}`, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    this.font = family;
    this.plot = new uPlot(
      {
        width: box.clientWidth || 300,
        height: box.clientHeight || 150,
        padding: [6, 14, 0, 0],
        legend: { show: false },
        // The other charts follow the cursor, but not a selection: one that is not drawn yet has no scale for it.
        cursor: {
          sync: {
            key: group,
            filters: {
              pub: () => true,
              sub: (/** @type {string} */ type) => type === 'mousemove' || type === 'mouseleave',
            },
          },
          points: { size: 7, width: 2 },
          drag: { x: true, y: false, setScale: false },
        },
        hooks: {
          draw: [() => this.drawMarks()],
          setCursor: [(/** @type {any} */ plot) => onCursor(plot.cursor.idx ?? null)],
          setSelect: [(/** @type {any} */ plot) => this.zoomToSelection(plot)],
        },
        scales: {
          x: {
            time: false,
            range: (/** @type {any} */ _plot, /** @type {number} */ low, /** @type {number} */ high) =>
              this.range ?? [low, high],
          },
          y: logScale
            ? { distr: 3 }
            : {
                range: (
                  /** @type {any} */ _plot,
                  /** @type {number | null} */ low,
                  /** @type {number | null} */ high,
                ) => {
                  if (low == null || high == null) return [0, 1];
                  // A constant whose last digits differ by rounding is shown as one.
                  const size = Math.max(Math.abs(low), Math.abs(high));
                  const margin = (high - low > size * 1e-6 ? high - low : size || 1) * 0.06;
                  return [low - margin, high + margin];
                },
              },
        },
        axes: [
          {
            ...axis,
            size: 26,
            gap: 4,
            incrs: () => (this.hasWholeSteps() ? WHOLE_TICK_DISTANCES : TICK_DISTANCES),
            space: isWide ? 70 : 48,
            values: (/** @type {any} */ _plot, /** @type {number[]} */ positions) =>
              ticks ? positions.map(ticks) : tickLabels(positions),
          },
          {
            ...axis,
            size: (/** @type {any} */ _plot, /** @type {string[] | null} */ labels) =>
              Math.max(50, ...(labels ?? []).map((label) => 12 + 6.2 * label.length)),
            gap: 6,
            space: 34,
            values: (/** @type {any} */ _plot, /** @type {(number | null)[]} */ positions) => tickLabels(positions),
          },
        ],
        series: [
          {},
          ...shown.map((curve) => ({
            label: curve.name,
            stroke: resolveColor(curve.color),
            width: curve.faint ? 1 : curve.dots ? 1.5 : 1.75,
            alpha: curve.faint ? 0.28 : 1,
            spanGaps: true,
            points: curve.dots ? { show: true, size: 6, fill: resolveColor(curve.color), width: 0 } : { show: false },
          })),
        ],
      },
      this.data,
      box,
    );
    this.plot.over.addEventListener('dblclick', () => this.onZoom?.(null));
    this.resizeObserver = new ResizeObserver(() => {
      if (box.clientWidth && (this.plot.width !== box.clientWidth || this.plot.height !== box.clientHeight)) {
        this.plot.setSize({ width: box.clientWidth, height: box.clientHeight });
      }
    });
    this.resizeObserver.observe(box);
    this.intersectionObserver = new IntersectionObserver(([entry]) => {
      this.isInSight = entry.isIntersecting;
      this.scheduleDraw();
    });
    this.intersectionObserver.observe(box);
  }

  /**
   * @param {any[]} data The common positions and the values of each curve, as `align` returns them.
   * @param {Mark[]} marks
   * @param {[number, number] | null} range
   * @param {boolean} isAtOnce True after a change by hand, which does not wait for its turn.
   */
  showData(data, marks, range, isAtOnce) {
    Object.assign(this, { data, marks, range, isStale: true });
    if (isAtOnce) this.drawnAt = -Infinity;
    this.scheduleDraw();
  }

  scheduleDraw() {
    if (!this.isStale || !this.isInSight || this.timer !== undefined) return;
    const wait = Math.max(0, this.drawnAt + DRAW_EVERY_MS - performance.now());
    this.timer = setTimeout(() => {
      this.timer = undefined;
      if (!this.isInSight) return;
      this.drawnAt = performance.now();
      this.isStale = false;
      this.plot.setData(this.data, true);
    }, wait);
  }

  /** True if the positions look like numbers of steps, between which there is nothing. */
  hasWholeSteps() {
    const [x] = this.data;
    return [x[0], x[x.length >> 1], x[x.length - 1]].every(Number.isInteger);
  }

  /** @param {any} plot */
  zoomToSelection(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (width < 4) return;
    const range = /** @type {[number, number]} */ ([plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x')]);
    if (range.every(Number.isFinite)) this.onZoom?.(range);
  }

  drawMarks() {
    const { plot } = this;
    const context = plot.ctx;
    const ratio = devicePixelRatio;
    const right = plot.bbox.left + plot.bbox.width;
    context.save();
    context.font = `${10.5 * ratio}px ${this.font}`;
    context.textBaseline = 'top';
    const marksInSight = this.marks
      .map((mark) => ({ ...mark, left: plot.valToPos(mark.at, 'x', true) }))
      .filter(({ left }) => left >= plot.bbox.left && left <= right)
      .toSorted((first, second) => first.left - second.left);
    for (const { kind, left } of marksInSight) {
      context.strokeStyle = this.marksColors[kind];
      context.setLineDash([3 * ratio, 3 * ratio]);
      context.lineWidth = ratio;
      context.globalAlpha = 0.8;
      context.beginPath();
      context.moveTo(left, plot.bbox.top);
      context.lineTo(left, plot.bbox.top + plot.bbox.height);
      context.stroke();
    }
    context.globalAlpha = 1;
    const labels = (this.isWide && plot.width > 560 ? marksInSight : []).flatMap(({ kind, left, text }) =>
      text ? [{ kind, left, text, width: context.measureText(text).width + 10 * ratio }] : [],
    );
    // The attempts and actions are also in the history, with those whose label is left out.
    for (const { kind, text, start, width, line } of placeLabels(labels, right, MARK_LINES)) {
      const top = plot.bbox.top + (2 + 14 * line) * ratio;
      context.fillStyle = this.surface;
      context.fillRect(start + 3 * ratio, top - ratio, width - 6 * ratio, 13 * ratio);
      context.fillStyle = this.marksColors[kind];
      context.textAlign = 'left';
      context.fillText(text, start + 5 * ratio, top);
    }
    context.restore();
  }

  destroy() {
    clearTimeout(this.timer);
    this.resizeObserver.disconnect();
    this.intersectionObserver.disconnect();
    this.plot.destroy();
  }
}
