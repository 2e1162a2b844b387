// Calls of the HTTP API, with the session's cookie.

/** Error response of the API, or a failure to reach it (status 0). */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} detail
   * @param {{ field: string, code: string, message: string }[]} [errors]
   * @param {string | null} [requestId]
   */
  constructor(status, code, detail, errors = [], requestId = null) {
    super(detail);
    this.status = status;
    this.code = code;
    this.errors = errors;
    this.requestId = requestId;
  }

  /** True if the same request may succeed later without a change. */
  get isTemporary() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** @type {() => void} */
let onSignedOut = () => {};

/** @param {() => void} callback Called when a call finds that there is no valid session. */
export function setSignedOutHandler(callback) {
  onSignedOut = callback;
}

/**
 * @typedef {object} Options
 * @property {Record<string, string | number | boolean | string[] | null | undefined>} [query]
 * @property {unknown} [body] Sent as JSON.
 * @property {AbortSignal} [signal]
 * @property {Record<string, string>} [headers]
 */

/**
 * Call the API and return the parsed response; `null` for one without content.
 *
 * Throws `ApiError`. A 401 also leads to the page for signing in.
 * @param {string} method
 * @param {string} path
 * @param {Options} [options]
 * @returns {Promise<any>}
 */
export async function sendRequest(method, path, { query, body, signal, headers } = {}) {
  const response = await fetchResponse(method, path + formatQuery(query), {
    method,
    signal,
    headers: body === undefined ? headers : { 'Content-Type': 'application/json', ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw await readError(response, path);
  if (response.status === 204) return null;
  try {
    return await ((response.headers.get('content-type') ?? '').includes('json') ? response.json() : response.text());
  } catch (error) {
    // The connection broke within the body.
    throw signal?.aborted ? error : createUnreachableError(method);
  }
}

/** A key for `Idempotency-Key`. `crypto.randomUUID` does not exist on pages over plain HTTP. */
export const createIdempotencyKey = () =>
  Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16).padStart(8, '0')).join('');

/** @param {string} method */
function createUnreachableError(method) {
  const advice =
    method === 'GET' ? 'It is tried again.' : 'Nothing is known about the request; look before you repeat it.';
  return new ApiError(0, 'unreachable', `The service cannot be reached. ${advice}`);
}

/**
 * @param {string} path
 * @param {Options['query']} [query]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export const get = (path, query, signal) => sendRequest('GET', path, { query, signal });

/**
 * Read a part of a file; shorter at its end, and empty after it.
 * @param {string} path
 * @param {number} start
 * @param {number} size
 * @param {AbortSignal} [signal]
 * @returns {Promise<Uint8Array>}
 */
export async function getBytes(path, start, size, signal) {
  const headers = { Range: `bytes=${start}-${start + size - 1}` };
  const response = await fetchResponse('GET', path, { signal, headers });
  if (response.status === 416) return new Uint8Array();
  if (!response.ok) throw await readError(response, path);
  try {
    return new Uint8Array(await response.arrayBuffer());
  } catch (error) {
    throw signal?.aborted ? error : createUnreachableError('GET');
  }
}

/**
 * @param {string} path
 * @param {unknown} [body]
 * @param {Record<string, string>} [headers]
 * @returns {Promise<any>}
 */
export const post = (path, body = {}, headers) => sendRequest('POST', path, { body, headers });

/** @param {Options['query']} query */
export function formatQuery(query) {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value == null || value === '') continue;
    for (const item of Array.isArray(value) ? value : [value]) params.append(name, String(item));
  }
  const text = params.toString();
  return text && `?${text}`;
}

/** @param {string} method @param {string} url @param {RequestInit} init */
async function fetchResponse(method, url, init) {
  try {
    return await fetch(url, { credentials: 'same-origin', ...init });
  } catch (error) {
    throw init.signal?.aborted ? error : createUnreachableError(method);
  }
}

/** @param {Response} response @param {string} path */
async function readError(response, path) {
  const body = await response.json().catch(() => ({}));
  const problem = body.error ? readOpenaiProblem(body.error) : body;
  if (response.status === 401 && path !== '/v1/session') onSignedOut();
  return new ApiError(
    response.status,
    problem.code ?? 'unknown',
    problem.detail ?? `The service answered with status ${response.status}.`,
    problem.errors ?? [],
    problem.request_id ?? response.headers.get('x-request-id'),
  );
}

/** Error in OpenAI's form, which those below `/openai` have. @param {any} error */
const readOpenaiProblem = ({ code, message, errors }) => ({ code, detail: message, errors });

/**
 * Ask a model, and yield the parts of its answer as they arrive.
 *
 * Throws `ApiError`, also for an answer that ends before its last part.
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {(runId: string | null) => void} onOpen Called once with the serving run, whose model may not be loaded yet.
 * @returns {AsyncGenerator<any>} Objects `chat.completion.chunk`.
 */
export async function* streamAnswer(body, signal, onOpen) {
  const path = '/openai/v1/chat/completions';
  const init = { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body), signal };
  const failRead = (/** @type {unknown} */ error) => {
    if (signal.aborted) throw error;
    throw new ApiError(0, 'connection_lost', 'The connection broke before the end of the answer: ask again.');
  };
  const response = await fetch(path, init).catch(failRead);
  if (!response.ok || !response.body) throw await readError(response, path);
  onOpen(response.headers.get('x-anneal-run'));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read().catch(failRead);
    if (done) return failRead(null);
    const lines = (rest + value).split('\n');
    rest = lines.pop() ?? '';
    for (const line of lines) {
      if (line === 'data: [DONE]') return;
      if (!line.startsWith('data: ')) continue; // a comment that keeps the connection alive, or the end of an event
      const chunk = JSON.parse(line.slice('data: '.length));
      if (chunk.error) throw new ApiError(500, chunk.error.code, chunk.error.message);
      yield chunk;
    }
  }
}

/**
 * Upload a file as `multipart/form-data`, with progress; `XMLHttpRequest`, because `fetch` reports none for uploads.
 * @param {string} path
 * @param {FormData} form
 * @param {(sent: number, total: number) => void} onProgress Bytes.
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function uploadForm(path, form, onProgress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open('POST', path);
    request.upload.onprogress = (event) => onProgress(event.loaded, event.total);
    request.onerror = () =>
      reject(new ApiError(0, 'unreachable', 'The connection broke during the upload; try again.'));
    request.onabort = () => reject(new DOMException('The upload was cancelled.', 'AbortError'));
    request.onload = async () => {
      const response = new Response(request.responseText, {
        status: request.status,
        headers: { 'content-type': request.getResponseHeader('content-type') ?? '' },
      });
      if (response.ok) resolve(await response.json());
      else reject(await readError(response, path));
    };
    signal?.addEventListener('abort', () => request.abort());
    request.send(form);
  });
}
