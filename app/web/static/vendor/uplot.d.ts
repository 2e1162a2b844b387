// Types of static/vendor/uplot.js, which is a file of this package; for `make lint` only.
export { default } from 'uplot';
