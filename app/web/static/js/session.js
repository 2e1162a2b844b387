// The signed-in person: the session, whose cookie no script can read, and what its key may do.

import { signal } from '../vendor/preact.js';
import { sanitizeAddress } from './addresses.js';
import { sendRequest, get } from './api.js';
import { navigate, path, query } from './router.js';

/** @typedef {{ key_id: string, name: string, scopes: string[], expires_at: string | null }} Session */

/** Null before it is known, and without a session. */
export const session = signal(/** @type {Session | null} */ (null));

/** Read the session; leads to the page for signing in if there is none. */
export async function readSession() {
  session.value = await get('/v1/session').catch((error) => {
    if (error.status === 401) return null;
    throw error;
  });
  if (session.value === null) askToSignIn();
}

/** @param {{ key: string } | { link: string }} credentials */
export async function signIn(credentials) {
  session.value = await sendRequest('POST', '/v1/session', { body: credentials });
}

export async function signOut() {
  await sendRequest('DELETE', '/v1/session').catch((error) => {
    if (error.status !== 401) throw error; // the session has ended already
  });
  session.value = null;
  navigate('/login');
}

/** Show the page for signing in, which leads back to the present address. */
export function askToSignIn() {
  session.value = null;
  if (path.value === '/login') return;
  const here = location.pathname + location.search;
  navigate(here === '/' ? '/login' : `/login?next=${encodeURIComponent(here)}`, { replace: true });
}

/** Address to show after signing in: a path of this site, never another one. */
export const nextAddress = () => sanitizeAddress(query.value.get('next'));

/** @param {'read' | 'write' | 'admin'} scope */
export function hasScope(scope) {
  const scopes = session.value?.scopes ?? [];
  return scopes.includes(scope) || scopes.includes('admin');
}
