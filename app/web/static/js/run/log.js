// Log of a run: a window of rows, of which only those in sight are in the page.

import { html, useEffect, useLayoutEffect, useRef, useState } from '../../vendor/preact.js';
import { ApiError, get } from '../api.js';
import { Icon } from '../components/icon.js';
import { ErrorText, Prose } from '../components/states.js';
import * as format from '../format.js';
import { splitAtMatches, MOST_LINES, computeRowsInSight } from '../log_window.js';
import { useResource, useSettled } from '../resource.js';

const ROW_HEIGHT = 18;
/** Wrapped rows have no fixed height, so that all of them are in the page. */
const MOST_WRAPPED = 1000;
const NEAR_END = 4;

/** @param {{ store: import('../run_store.js').RunStore, height: string }} props */
export function Log({ store, height }) {
  void store.logVersion.value; // draw again with new lines
  const [isFollowing, setFollowing] = useState(true);
  const [isWrapped, setWrapped] = useState(false);
  const level = store.logLevel.value;
  const [text, setText] = useState('');
  const search = useSettled(text, 300);
  const [hit, setHit] = useState(0);
  const [view, setView] = useState({ top: 0, height: 232 });
  const [failure, setFailure] = useState(/** @type {ApiError | null} */ (null));
  /**
   * Wait for a read of the log, and show its failure: the lines stay, and the next scroll or click reads again.
   * @param {Promise<void>} read
   */
  const showFailure = (read) =>
    read.then(
      () => setFailure(null),
      (error) => {
        if (error instanceof ApiError) setFailure(error);
        else if (error.name !== 'AbortError') throw error;
      },
    );
  store.log.isHeld = !isFollowing;
  useEffect(() => {
    const releaseLimit = () => store.log.setLimit(MOST_LINES, 0);
    releaseLimit();
    // Another view of the log may have left it in the middle, or with lines of one level.
    if (!store.log.isAtEnd || store.logLevel.peek() !== '') showFailure(store.readLog(''));
    return () => {
      store.log.isHeld = false;
      releaseLimit();
    };
  }, [store]);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const isReading = useRef(false);
  const matches = useResource(
    (signal) => get(`/v1/runs/${store.id}/logs/search`, { q: search, limit: 1000 }, signal),
    search ? `${store.id} ${search}` : null,
    { keep: false },
  );
  const hits = search ? (matches.data?.data ?? []) : [];
  const { lines } = store.log;
  const [first, last] = isWrapped
    ? [0, lines.length]
    : computeRowsInSight(lines.length, ROW_HEIGHT, view.top, view.height);

  useLayoutEffect(() => {
    if (isFollowing && box.current) box.current.scrollTop = box.current.scrollHeight;
  });
  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const observer = new ResizeObserver(() => setView({ top: element.scrollTop, height: element.clientHeight }));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  /**
   * Change the lines of the window; those in sight stay where they are.
   * @param {() => Promise<void>} change
   * @param {boolean} [willWrap]
   */
  const keepPlace = async (change, willWrap = isWrapped) => {
    const element = /** @type {HTMLElement} */ (box.current);
    const top = element.getBoundingClientRect().top;
    const topmost = /** @type {HTMLElement | undefined} */ (
      [...element.querySelectorAll('.ln')].find((row) => row.getBoundingClientRect().bottom > top)
    );
    isReading.current = true;
    const offset = topmost ? topmost.getBoundingClientRect().top - top : 0;
    const seq = Number(topmost?.dataset.seq);
    await change();
    requestAnimationFrame(() => {
      const row = /** @type {HTMLElement | null} */ (element.querySelector(`[data-seq="${seq}"]`));
      const index = store.log.lines.findIndex((line) => line.seq === seq);
      if (willWrap)
        element.scrollTop += row ? row.getBoundingClientRect().top - element.getBoundingClientRect().top - offset : 0;
      else if (index >= 0) element.scrollTop = index * ROW_HEIGHT - offset;
      isReading.current = false;
    });
  };
  const onScroll = () => {
    const element = box.current;
    if (!element) return;
    setView({ top: element.scrollTop, height: element.clientHeight });
    const below = element.scrollHeight - element.scrollTop - element.clientHeight;
    setFollowing(store.log.isAtEnd && below < NEAR_END * ROW_HEIGHT);
    if (isReading.current) return;
    if (below < 40 * ROW_HEIGHT && !store.log.isAtEnd) keepPlace(() => showFailure(store.readNewerLines()));
    else if (element.scrollTop <= 40 * ROW_HEIGHT && store.log.hasOlder)
      keepPlace(() => showFailure(store.readOlderLines()));
  };
  const setWrapping = (/** @type {boolean} */ isOn) => {
    const middle = isFollowing ? lines.length : Math.floor(view.top / ROW_HEIGHT);
    keepPlace(async () => {
      store.log.setLimit(isOn ? MOST_WRAPPED : MOST_LINES, middle);
      setWrapped(isOn);
    }, isOn);
  };
  const chooseLevel = async (/** @type {string} */ nextLevel) => {
    await showFailure(store.readLog(nextLevel));
    setFollowing(true);
  };
  const scrollToEnd = async () => {
    if (!store.log.isAtEnd) await showFailure(store.readLog());
    setFollowing(true);
  };
  const showHit = async (/** @type {number} */ index) => {
    const seq = hits[index];
    if (seq === undefined) return;
    setHit(index);
    setFollowing(false);
    await showFailure(store.showLine(seq));
    requestAnimationFrame(() => {
      const element = box.current;
      const row = store.log.lines.findIndex((line) => line.seq === seq);
      if (!element || row < 0) return;
      const shownLine = isWrapped && element.querySelector(`[data-seq="${seq}"]`);
      const top = shownLine
        ? element.scrollTop + shownLine.getBoundingClientRect().top - element.getBoundingClientRect().top
        : row * ROW_HEIGHT;
      element.scrollTop = Math.max(0, top - element.clientHeight / 2);
    });
  };
  useEffect(() => {
    if (hits.length > 0) showHit(hits.length - 1);
  }, [matches.data]);

  return html`<section class="box log" aria-label="Log" style=${{ '--h': height }}>
    <header class="tools">
      <h2>Log</h2>
      <span class="sub num">
        ${format.counted(lines.length, 'line')}
        ${store.log.hasOlder ? ' shown, older ones above' : ''}
      </span>
      <span class="grow"></span>
      <input
        type="search"
        class="small"
        placeholder="Search all lines"
        aria-label="Search all lines of the log"
        value=${text}
        onInput=${(/** @type {any} */ event) => setText(event.target.value)}
        onKeyDown=${(/** @type {KeyboardEvent} */ event) =>
          event.key === 'Enter' && showHit((hit + (event.shiftKey ? 1 : hits.length - 1)) % Math.max(hits.length, 1))}
      />
      ${search && html`<span class="sub num" role="status">
        ${matches.error
          ? html`<${Prose} text=${matches.error.message} />`
          : matches.data
            ? hits.length
              ? `${hit + 1} of ${format.integer(hits.length)}${matches.data.has_more ? '+' : ''}`
              : 'no match'
            : 'searching …'}
      </span>`}
      ${search &&
      (matches.data?.complete ?? []).map(
        (/** @type {any} */ log) => html`<a
          key=${log.attempt}
          class="sub num"
          href=${`${log.complete_log}&grep=${encodeURIComponent(search)}`}
          title=${log.problem ??
          `${format.counted(log.left_out, 'line')} of attempt ${log.attempt} are only in its complete log`}
        >
          ${log.matches === null ? 'complete log not searched' : `${format.integer(log.matches)} in the complete log`}
        </a>`,
      )}
      <select
        class="small"
        aria-label="Level"
        value=${level}
        onChange=${(/** @type {any} */ event) => chooseLevel(event.target.value)}
      >
        <option value="">All levels</option>
        <option value="warning">Warnings and errors</option>
        <option value="error">Errors</option>
      </select>
      <label class="check">
        <input
          type="checkbox"
          checked=${isWrapped}
          onChange=${(/** @type {any} */ event) => setWrapping(event.target.checked)}
        />
        Wrap
      </label>
      <label class="check">
        <input
          type="checkbox"
          checked=${isFollowing}
          onChange=${(/** @type {any} */ event) => (event.target.checked ? scrollToEnd() : setFollowing(false))}
        />
        Follow
      </label>
      <a
        class="btn quiet icon small"
        href=${`/v1/runs/${store.id}/logs`}
        download=${`${store.id}.log`}
        aria-label="Download the log"
      >
        <${Icon} name="save" />
      </a>
      <a
        class="btn quiet small"
        href=${`/v1/runs/${store.id}/logs/complete`}
        download=${`${store.id}-complete.log`}
        title="Every line, those too that the stream left out"
      >
        Complete log
      </a>
    </header>
    <${ErrorText} error=${failure} />
    <div
      class=${isWrapped ? 'lines wraps' : 'lines'}
      ref=${box}
      tabindex="0"
      role="log"
      aria-label="Lines of the log"
      aria-live="off"
      onScroll=${onScroll}
    >
      ${!isWrapped && html`<div style=${{ height: `${first * ROW_HEIGHT}px` }}></div>`}
      ${lines
        .slice(first, last)
        .map((line) => html`<${Row} key=${line.seq} line=${line} wanted=${search} isHit=${hits[hit] === line.seq} />`)}
      ${!isWrapped && html`<div style=${{ height: `${(lines.length - last) * ROW_HEIGHT}px` }}></div>`}
      ${lines.length === 0 && html`<p class="state muted">
        ${store.isReading('log') ? 'Loading the log …' : level ? 'No line of this level.' : 'No line yet.'}
      </p>`}
    </div>
  </section>`;
}

/** @param {{ line: import('../log_window.js').Line, wanted: string, isHit: boolean }} props */
const Row = ({ line, wanted: search, isHit }) => html`<div
  class=${isHit ? 'ln hit' : 'ln'}
  data-seq=${line.seq}
  data-l=${line.stream === 'anneal' && line.level === 'info' ? 'note' : line.level}
>
  <time title=${line.ts}>${format.seconds(line.ts)}</time>
  <span>
    ${splitAtMatches(line.line, search).map((part) => (part.isMatch ? html`<mark>${part.text}</mark>` : part.text))}
  </span>
</div>`;
