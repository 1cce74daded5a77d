/* Diagrams: loads the site's own Mermaid when a page holds one, and colours it.
 *
 * Material takes any global named `mermaid` for the library and fetches one from
 * a CDN when there is none. So a small stand-in answers to that name; its first
 * render() loads mermaid.min.js from beside this file, which then replaces it.
 * Pages without a diagram never load the 3.5 MB.
 *
 * Material renders into a closed shadow root: page selectors do not reach in, CSS
 * custom properties do. The theme below maps node classes (`A[文字]:::compute`) to
 * the variables of palette.css, so a diagram follows the colour toggle at once.
 */
(() => {
  const library = new URL("mermaid.min.js", document.currentScript.src).href;
  const roles = ["input", "compute", "memory", "decision", "pass", "fail", "warning"];

  const themeCSS = `
    ${roles
      .map(
        (role) => `
    .node.${role} > *:not(.label), .node.${role} > .label-container > * {
      fill: var(--hf-${role}-fill) !important;
      stroke: var(--hf-${role}-stroke) !important;
      stroke-width: 1.5px !important;
    }
    .node.${role} .label, .node.${role} .nodeLabel, .node.${role} .nodeLabel p {
      color: var(--hf-ink) !important;
      fill: var(--hf-ink) !important;
    }`,
      )
      .join("")}
    .flowchart-link, .messageLine0, .messageLine1 { stroke: var(--hf-line) !important; }
    .actor-line { stroke: var(--hf-line) !important; }
    .marker, .arrowheadPath, #arrowhead path, [id$="arrowhead"] path { fill: var(--hf-line) !important; stroke: var(--hf-line) !important; }
    .cluster > rect { fill: transparent !important; stroke: var(--hf-line) !important; }
    .actor { fill: var(--hf-compute-fill) !important; stroke: var(--hf-compute-stroke) !important; }
    .note { fill: var(--hf-decision-fill) !important; stroke: var(--hf-decision-stroke) !important; }
    text.actor > tspan, .noteText > tspan, .messageText { fill: var(--hf-ink) !important; }
    .edgeLabel, .edgeLabel p, .labelBkg {
      background-color: var(--md-default-bg-color) !important;
      color: var(--md-default-fg-color) !important;
    }
  `;

  let config = {};
  let loading;

  function load() {
    loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = library;
      script.onload = () => {
        const mermaid = globalThis.mermaid;
        // Compact, so that a diagram needs no shrinking on a phone.
        const flowchart = { nodeSpacing: 24, rankSpacing: 36, padding: 8, ...config.flowchart };
        const sequence = { actorMargin: 24, width: 110, mirrorActors: false, ...config.sequence };
        mermaid.initialize({ ...config, flowchart, sequence, themeCSS: (config.themeCSS ?? "") + themeCSS });
        resolve(mermaid);
      };
      script.onerror = () => reject(new Error(`cannot load ${library}`));
      document.head.append(script);
    });
    return loading;
  }

  globalThis.mermaid = {
    initialize(options) {
      config = options;
    },
    async render(...args) {
      return (await load()).render(...args);
    },
  };
})();
