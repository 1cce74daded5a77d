/* Diagrams that are not drawn yet: loads the site's own Mermaid when a page holds one.
 *
 * `make diagrams` draws every diagram ahead of time, with this file and Mermaid in a
 * browser, and the build puts the drawings into the pages. Only a diagram that changed
 * since is still a <pre class="mermaid">, which Material renders where it is read.
 *
 * Material takes any global named `mermaid` for the library and fetches one from
 * a CDN when there is none. So a small stand-in answers to that name; its first
 * render() loads mermaid.min.js from beside this file, which then replaces it.
 * Pages whose diagrams are all drawn never load the 3.5 MB.
 *
 * Material renders into a closed shadow root: page selectors do not reach in, CSS
 * custom properties do. The theme below maps node classes (`A[文字]:::compute`) to
 * the variables of palette.css, so a diagram follows the colour toggle at once.
 */
(() => {
  const library = new URL("mermaid.min.js", document.currentScript.src).href;
  const roles = ["input", "compute", "memory", "decision", "pass", "fail", "warning"];
  const background = "var(--md-default-bg-color)";

  const themeCSS = `
    ${roles
      .map(
        (role) => `
    .node.${role} .label-container, .node.${role} .label-container > * {
      fill: var(--hf-${role}-fill) !important;
      stroke: var(--hf-${role}-stroke) !important;
      stroke-width: 1.5px !important;
    }`,
      )
      .join("")}
    .node rect[rx] { rx: 1em; ry: 1em; }
    .flowchart-link, .messageLine0, .messageLine1, .actor-line { stroke: var(--hf-line) !important; }
    .marker, .arrowheadPath, [id$="arrowhead"] path { fill: var(--hf-line) !important; stroke: var(--hf-line) !important; }
    .cluster > rect { fill: transparent !important; stroke: var(--hf-line) !important; }
    .actor { fill: var(--hf-compute-fill) !important; stroke: var(--hf-compute-stroke) !important; }
    .note { fill: var(--hf-decision-fill) !important; stroke: var(--hf-decision-stroke) !important; }
    .edgeLabel rect.background { fill: ${background} !important; opacity: 1 !important; }
    text, text.actor > tspan, .noteText > tspan, .messageText, .nodeLabel { fill: var(--hf-ink) !important; }
    .messageText { stroke: ${background} !important; stroke-width: 4px !important; paint-order: stroke; }
  `;

  const font = { fontFamily: "var(--md-text-font-family)", fontSize: 16 };
  const settings = {
    startOnLoad: false,
    theme: "base",
    themeCSS,
    ...font,
    handDrawnSeed: 1, // else the outline of some shapes is different every time
    deterministicIds: true,
    // Labels are SVG text, centred: a reader's wider font takes from the margins, where HTML of a fixed size would be cut.
    htmlLabels: false,
    // Compact, so that a diagram needs no shrinking on a phone.
    flowchart: { htmlLabels: false, nodeSpacing: 20, rankSpacing: 36, padding: 10, useMaxWidth: false },
    sequence: {
      diagramMarginX: 2, actorMargin: 20, width: 90, mirrorActors: false, useMaxWidth: false,
      ...Object.fromEntries(["actor", "message", "note"].flatMap((part) => Object.entries(font).map(([key, value]) => [part + key[0].toUpperCase() + key.slice(1), value]))),
    },
  };

  let loading;

  function load() {
    loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = library;
      script.onload = () => {
        globalThis.mermaid.initialize(settings);
        resolve(globalThis.mermaid);
      };
      script.onerror = () => reject(new Error(`cannot load ${library}`));
      document.head.append(script);
    });
    return loading;
  }

  globalThis.mermaid = {
    initialize() {}, // Material's own settings: what is drawn ahead must not differ from what is drawn live
    async render(...args) {
      return (await load()).render(...args);
    },
  };
})();
