// Entry of the dashboard: signs in, and shows the page of the address.

import { effect, html, render, signal } from '../vendor/preact.js';
import { matchRoute } from './addresses.js';
import { ApiError, setSignedOutHandler } from './api.js';
import { Frame } from './components/frame.js';
import { Empty, Failure } from './components/states.js';
import * as router from './router.js';
import { askToSignIn, readSession, session } from './session.js';
import * as theme from './theme.js';

const ICON = new URL('../icon.svg', import.meta.url).href;

/** @type {Record<string, () => Promise<{ default: any, title: string }>>} */
const PAGES = {
  runs: () => import('./pages/runs.js'),
  run: () => import('./pages/run.js'),
  compare: () => import('./pages/compare.js'),
  experiments: () => import('./pages/experiments.js'),
  datasets: () => import('./pages/datasets.js'),
  webhooks: () => import('./pages/webhooks.js'),
  workers: () => import('./pages/workers.js'),
  try: () => import('./pages/try.js'),
  new: () => import('./pages/new.js'),
  login: () => import('./pages/login.js'),
};

/** Set while the page is loaded again for a module that was not found. */
const RELOADED_KEY = 'anneal.reloaded';

const START_AGAIN_MS = 3000;

const shownPage = signal(/** @type {{ key: string, view: any } | null} */ (null));

/**
 * Load the module of a page. After an upgrade of the service, the modules of this version are gone: the whole page is
 * loaded again, once.
 * @param {string} name
 */
async function loadPage(name) {
  try {
    const module = await PAGES[name]();
    sessionStorage.removeItem(RELOADED_KEY);
    return module;
  } catch (error) {
    if (sessionStorage.getItem(RELOADED_KEY))
      return {
        default: () => html`<${Failure} error=${new ApiError(
          0,
          'unreachable',
          'The page could not be loaded. Reload it when the service is back.',
        )} />`,
        title: 'Not loaded',
      };
    sessionStorage.setItem(RELOADED_KEY, '1');
    location.reload();
    throw error;
  }
}

/** @param {string} path */
async function showPage(path) {
  const route = matchRoute(path);
  const module = await (route && loadPage(route.name)); // never within the effect that calls this
  if (router.path.value !== path) return; // another page was opened meanwhile
  document.title = `${module ? module.title : 'Not found'} · Anneal`;
  const isNavigation = shownPage.value !== null;
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
  shownPage.value = { key: path, view };
  if (isNavigation) requestAnimationFrame(() => document.getElementById('main')?.focus({ preventScroll: true }));
}

function App() {
  if (session.value === null && router.path.value !== '/login') return null;
  return html`<${Frame} icon=${ICON}><div key=${shownPage.value?.key}>${shownPage.value?.view}</div><//>`;
}

theme.startTheme();
router.startRouter();
setSignedOutHandler(askToSignIn);
const root = /** @type {HTMLElement} */ (document.getElementById('app'));

/** @type {ReturnType<typeof setTimeout> | undefined} */
let startTimer;

async function startApp() {
  clearTimeout(startTimer);
  if (router.path.value !== '/login') {
    try {
      await readSession();
    } catch (error) {
      // The service is away: the page comes by itself when it is back.
      render(html`<main class="page" id="main"><${Failure} error=${error} onRetry=${startApp} /></main>`, root);
      clearTimeout(startTimer);
      startTimer = setTimeout(startApp, START_AGAIN_MS);
      return;
    }
  }
  render(html`<${App} />`, root);
  document.documentElement.dataset.ready = '1';
}

effect(() => {
  showPage(router.path.value);
});
startApp();
