// Addresses of the pages. Pure: no access to the page.

/** @typedef {{ name: string, params: Record<string, string> }} Route */

const ROUTES = /** @type {const} */ ([
  ['/', 'runs'],
  ['/runs/:id', 'run'],
  ['/compare', 'compare'],
  ['/experiments', 'experiments'],
  ['/experiments/:id', 'experiments'],
  ['/datasets', 'datasets'],
  ['/datasets/:id', 'datasets'],
  ['/webhooks', 'webhooks'],
  ['/webhooks/:id', 'webhooks'],
  ['/workers', 'workers'],
  ['/try', 'try'],
  ['/new', 'new'],
  ['/login', 'login'],
]);

/**
 * @param {string} path
 * @returns {Route | null} Null for an address that has no page.
 */
export function matchRoute(path) {
  const parts = path.replace(/\/+$/, '').split('/');
  for (const [pattern, name] of ROUTES) {
    const patternParts = pattern.replace(/\/+$/, '').split('/');
    if (patternParts.length !== parts.length) continue;
    /** @type {Record<string, string>} */
    const params = {};
    const fits = patternParts.every((part, index) => {
      if (!part.startsWith(':')) return part === parts[index];
      try {
        params[part.slice(1)] = decodeURIComponent(parts[index]);
      } catch {
        return false;
      }
      return parts[index] !== '';
    });
    if (fits) return { name, params };
  }
  return null;
}

/**
 * The address, if it is a path of this site; otherwise that of all runs.
 * @param {string | null} address
 */
export function sanitizeAddress(address) {
  // Browsers drop control characters and take a backslash for a slash: two of them would name another host.
  return address !== null && /^\/(?![/\\])[\x21-\x7e]*$/.test(address) ? address : '/';
}
