// Reads the dashboard's `html` templates as htm does, for the formatter. Pure: its tests need no package of npm.

/**
 * @typedef {object} Element
 * @property {Part[]} tag Name of the element, or an expression.
 * @property {Attribute[]} attributes
 * @property {Child[]} children
 * @property {string | null} closing Text of the closing tag; null for an element that closes itself.
 *
 * @typedef {string | number} Part A text, or the index of an expression.
 * @typedef {{ name: string, value: Part[] | null, quote: string }} Attribute
 * @typedef {{ text: string, breaksBefore: boolean, breaksAfter: boolean }} Text
 * @typedef {Element | Text | number} Child
 */

/**
 * Read a template as htm does.
 * @param {string[]} statics Its texts, between which its expressions are.
 * @returns {Child[]}
 */
export function parseTemplate(statics) {
  /** @type {Part[]} */
  const parts = statics.flatMap((text, index) => (index === 0 ? [...text] : [index - 1, ...text]));
  let position = 0;
  const isSpace = () => /** @type {Part[]} */ ([' ', '\n', '\t', '\r']).includes(parts[position]);
  const skipSpace = () => {
    while (isSpace()) position += 1;
  };

  /** @param {(part: Part) => boolean} isEnd @returns {Part[]} */
  const readUntil = (isEnd) => {
    /** @type {Part[]} */
    const read = [];
    for (; position < parts.length && !isEnd(parts[position]); position += 1) {
      const part = parts[position];
      const last = read.at(-1);
      if (typeof part === 'string' && typeof last === 'string') read[read.length - 1] = last + part;
      else read.push(part);
    }
    return read;
  };
  const isTagEnd = (/** @type {Part} */ part) =>
    isSpace() || part === '>' || (part === '/' && parts[position + 1] === '>');

  /** @returns {Attribute} */
  const readAttribute = () => {
    const name = readUntil((part) => part === '=' || isTagEnd(part));
    if (name[0] === '...') return { name: '...', value: name.slice(1), quote: '' };
    if (parts[position] !== '=') return { name: String(name), value: null, quote: '' };
    position += 1;
    const quote = parts[position] === '"' || parts[position] === "'" ? String(parts[position]) : '';
    if (!quote) return { name: String(name), value: readUntil(isTagEnd), quote };
    position += 1;
    const value = readUntil((part) => part === quote);
    position += 1;
    return { name: String(name), value, quote };
  };

  /** @returns {Element} */
  const readElement = () => {
    position += 1;
    /** @type {Element} */
    const element = {
      tag: readUntil((part) => part === '/' || isTagEnd(part)),
      attributes: [],
      children: [],
      closing: null,
    };
    for (skipSpace(); parts[position] !== '>' && parts[position] !== '/'; skipSpace()) {
      if (position >= parts.length) throw new SyntaxError('A tag of an html template does not end.');
      element.attributes.push(readAttribute());
    }
    if (parts[position] === '/') {
      position += 2;
      return element;
    }
    position += 1;
    element.children = readChildren();
    if (position >= parts.length) throw new SyntaxError('An element of an html template is not closed.');
    position += 1;
    element.closing = String(readUntil((part) => part === '>').join(''));
    position += 1;
    return element;
  };

  /** @returns {Child[]} */
  const readChildren = () => {
    /** @type {Child[]} */
    const children = [];
    while (position < parts.length && !(parts[position] === '<' && parts[position + 1] === '/')) {
      const part = parts[position];
      if (part === '<') {
        children.push(readElement());
      } else if (typeof part === 'number') {
        children.push(part);
        position += 1;
      } else {
        const raw = String(readUntil((next) => next === '<' || typeof next === 'number'));
        const text = raw.replace(/^\s*\n\s*|\s*\n\s*$/g, '');
        if (text) children.push({ text, breaksBefore: /^\s*\n/.test(raw), breaksAfter: /\n\s*$/.test(raw) });
      }
    }
    return children;
  };
  const children = readChildren();
  if (position < parts.length) throw new SyntaxError('An html template closes an element that it has not opened.');
  return children;
}

/** @param {Child} child @returns {child is Text} */
export const isText = (child) => typeof child === 'object' && 'text' in child;

/** @param {Child} child @returns {child is Element} */
export const isElement = (child) => typeof child === 'object' && 'tag' in child;

/**
 * Content of children, in which all white space inside a text is equal, as browsers show it.
 * @param {Child[]} children
 */
export const contentOf = (children) =>
  JSON.stringify(children, (name, value) => {
    if (name === 'breaksBefore' || name === 'breaksAfter') return undefined;
    return name === 'text' ? value.replace(/[ \t\n\r]+/g, ' ') : value;
  });
