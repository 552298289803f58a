// The libraries that the page uses, in the versions that it ships with (`.ci/vendor.py` fetches them).

import "./vendor/dompurify-3.4.18/purify.min.js";
import "./vendor/katex-0.19.1/katex.min.js";
import "./vendor/markdown-it-14.3.3/markdown-it.min.js";
import hljs from "./vendor/highlight.js-11.12.0/highlight.min.js";

// The first three are scripts, which define globals.
const { DOMPurify, katex, markdownit } = globalThis;

export { DOMPurify, hljs, katex, markdownit };
