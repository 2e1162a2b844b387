// Entry of the dashboard: signs in, and shows the page of the address.

import { effect, html, render, signal } from '../vendor/preact.js';
import { match } from './addresses.js';
import { ApiError, whenSignedOut } from './api.js';
import { Frame } from './components/frame.js';
import { Empty, Failure } from './components/states.js';
import * as router from './router.js';
import { askToSignIn, read, session } from './session.js';
import * as theme from './theme.js';

const ICON = new URL('../icon.svg', import.meta.url).href;

/** @type {Record<string, () => Promise<{ default: any, title: string }>>} */
const PAGES = {
  runs: () => import('./pages/runs.js'),
  run: () => import('./pages/run.js'),
  compare: () => import('./pages/compare.js'),
  experiments: () => import('./pages/experiments.js'),
  datasets: () => import('./pages/datasets.js'),
  workers: () => import('./pages/workers.js'),
  new: () => import('./pages/new.js'),
  login: () => import('./pages/login.js'),
};

/** Set while the page is loaded again for a module that was not found. */
const RELOADED = 'anneal.reloaded';

const shown = signal(/** @type {{ key: string, view: any } | null} */ (null));

/**
 * Load the module of a page. After an upgrade of the service, the modules of this version are gone: the whole page is
 * loaded again, once.
 * @param {string} name
 */
async function loaded(name) {
  try {
    const module = await PAGES[name]();
    sessionStorage.removeItem(RELOADED);
    return module;
  } catch (error) {
    if (sessionStorage.getItem(RELOADED))
      return {
        default: () => html`<${Failure} error=${new ApiError(
          0,
          'unreachable',
          'The page could not be loaded. Reload it when the service is back.',
        )} />`,
        title: 'Not loaded',
      };
    sessionStorage.setItem(RELOADED, '1');
    location.reload();
    throw error;
  }
}

/** @param {string} path */
async function show(path) {
  const route = match(path);
  const module = await (route && loaded(route.name)); // never within the effect that calls this
  if (router.path.value !== path) return; // another page was opened meanwhile
  document.title = `${module ? module.title : 'Not found'} · Anneal`;
  const moved = shown.value !== null;
  const view =
    module && route
      ? html`<${module.default} ...${route.params} />`
      : html`
          <div class="head"><h1>Not found</h1></div>
          <section class="box">
            <${Empty} title="There is no page at this address.">
              <p class="muted">Check the address, or start from the list of runs.</p>
              <p><a class="btn" href="/">All runs</a></p>
            <//>
          </section>
        `;
  shown.value = { key: path, view };
  if (moved) requestAnimationFrame(() => document.getElementById('main')?.focus({ preventScroll: true }));
}

function App() {
  if (session.value === null && router.path.value !== '/login') return null;
  return html`<${Frame} icon=${ICON}><div key=${shown.value?.key}>${shown.value?.view}</div><//>`;
}

theme.start();
router.start();
whenSignedOut(askToSignIn);
const root = /** @type {HTMLElement} */ (document.getElementById('app'));

async function start() {
  if (router.path.value !== '/login') {
    try {
      await read();
    } catch (error) {
      // The service is away: the page comes by itself when it is back.
      render(html`<main class="page" id="main"><${Failure} error=${error} onRetry=${start} /></main>`, root);
      setTimeout(start, 3000);
      return;
    }
  }
  render(html`<${App} />`, root);
  document.documentElement.dataset.ready = '1';
}

effect(() => {
  show(router.path.value);
});
start();
