// The page of `bridle export --web`; web.html puts the model's settings before it.
"use strict";
const model = JSON.parse(document.getElementById("model").textContent);
const at = id => document.getElementById(id);
const [length, bands] = [model.input[0], model.input[1] ?? 1], [patch, breadth] = [model.patch[0], model.patch[1] ?? 1];
const columns = bands / breadth, tokens = length / patch * columns, stages = model.colors.length;
const axes = {picture: ["row", "column"], sound: ["time", "band"], array: ["time"]}[model.kind];
const DRAWN = 4096, LISTED = 2000;  // frames and rows that are shown; downloads hold all
let sessions = null, found = null, view = 0, chosen = 0;

function say(state, text) {
  document.documentElement.dataset.state = state;
  at("status").textContent = text;
}

// Inputs: every kind of file as windows {x (C, length, bands), real}, the first `real` frames of x being the file's.

async function pixelsOf(file) {
  const kept = {imageOrientation: "from-image", premultiplyAlpha: "none", colorSpaceConversion: "none"};
  const bitmap = await createImageBitmap(file, kept).catch(() => { throw Error("this browser cannot read it as a picture"); });
  const canvas = Object.assign(document.createElement("canvas"), {width: bitmap.width, height: bitmap.height});
  const context = canvas.getContext("2d", {willReadFrequently: true});
  context.fillStyle = "white";  // what is transparent shows the page behind it
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

// Pillow's bicubic weights for one axis: {first, weights} of every output pixel, in 22-bit fixed point.
function weightsOf(size, low, high, out) {
  const scale = (high - low) / out, wide = Math.max(scale, 1), cubic = d => {
    const x = Math.abs(d);
    return x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
  };
  return Array.from({length: out}, (_, n) => {
    const centre = low + (n + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - 2 * wide + 0.5)), end = Math.min(size, Math.trunc(centre + 2 * wide + 0.5));
    const raw = Array.from({length: end - first}, (_, i) => cubic((i + first - centre + 0.5) / wide));
    const total = raw.reduce((a, b) => a + b, 0);
    return {first, weights: raw.map(w => Math.trunc(w / total * 2 ** 22 + (w < 0 ? -0.5 : 0.5)))};
  });
}

// One axis of a plane of bytes: (rows, size) -> (out, rows), so that two calls resize both axes.
function resized(plane, rows, size, low, high, out) {
  const made = new Uint8ClampedArray(out * rows);
  weightsOf(size, low, high, out).forEach(({first, weights}, n) => {
    for (let row = 0; row < rows; row++) {
      let sum = 2 ** 21;
      for (let i = 0; i < weights.length; i++) sum += plane[row * size + first + i] * weights[i];
      made[n * rows + row] = Math.floor(sum / 2 ** 22);
    }
  });
  return made;
}

async function* pictureWindows({data, width, height}) {
  const [high, wide] = model.size, scale = Math.min(width / wide, height / high), count = width * height;
  const left = (width - wide * scale) / 2, top = (height - high * scale) / 2;
  const pixels = Array.from({length: model.channels}, (_, c) => {
    const plane = new Uint8ClampedArray(count), grey = model.channels === 1;
    for (let i = 0, at = 0; i < count; i++, at += 4)
      plane[i] = grey ? (data[at] * 19595 + data[at + 1] * 38470 + data[at + 2] * 7471 + 32768) >> 16 : data[at + c];
    const turned = resized(plane, height, width, left, width - left, wide);  // (wide, height)
    return [...resized(turned, wide, height, top, height - top, high)];  // (high, wide)
  }).flat();
  const x = Float32Array.from(pixels, value => value / 255);
  yield {x: model.graphs.frontend ? await run("frontend", [tensor(x, model.size)]) : x, real: length};
}

// The sample rate in the head of a wav, flac, ogg or mp3 file, at which a browser decodes it unchanged; null for others.
function rateOf(buffer) {
  const bytes = new DataView(buffer), text = new TextDecoder("latin1").decode(buffer.slice(0, 4096)), kind = text.slice(0, 4);
  const number = (word, skip) => text.includes(word) ? bytes.getUint32(text.indexOf(word) + skip, true) : null;
  if (kind === "RIFF") return number("fmt ", 12);
  if (kind === "fLaC") return bytes.getUint32(18) >>> 12;
  if (kind === "OggS") return text.includes("OpusHead") ? 48000 : number("\x01vorbis", 12);
  let start = 0;
  if (kind.startsWith("ID3")) start = 10 + [6, 7, 8, 9].reduce((sum, i) => sum * 128 + bytes.getUint8(i), 0);
  if (start + 4 > buffer.byteLength || bytes.getUint16(start) < 0xffe0) return null;
  const version = bytes.getUint8(start + 1) >> 3 & 3;  // 3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5
  return [44100, 48000, 32000][bytes.getUint8(start + 2) >> 2 & 3] / [4, 1, 2, 1][version] || null;
}

// A band-limited filter like that of soxr's "HQ": flat to 0.913 of the lower Nyquist frequency, 125 dB down at 1.
function resample(wave, from, to) {
  const gcd = (a, b) => b ? gcd(b, a % b) : a, p = from / gcd(from, to), q = to / gcd(from, to);
  const low = Math.min(1, q / p), half = Math.ceil(94 / low), cut = 0.9565 * low, beta = 12.8;
  const bessel = x => { let sum = 1, term = 1; for (let k = 1; term > 1e-12 * sum; k++) sum += term *= (x / 2 / k) ** 2; return sum; };
  const tap = u => Math.abs(u) >= half ? 0 : bessel(beta * Math.sqrt(1 - (u / half) ** 2)) / bessel(beta) * (u ? Math.sin(Math.PI * cut * u) / Math.PI / u : cut);
  const phases = Array.from({length: q}, (_, n) => Float32Array.from({length: 2 * half}, (_, k) => tap(k - half + 1 - n / q)));
  const made = new Float32Array(Math.floor(wave.length * q / p + 0.5)), padded = new Float32Array(wave.length + 3 * half);
  padded.set(wave, half - 1);
  for (let n = 0; n < made.length; n++) {
    const start = Math.floor(n * p / q), taps = phases[n * p % q];
    let sum = 0;
    for (let k = 0; k < taps.length; k++) sum += taps[k] * padded[start + k];
    made[n] = sum;
  }
  return made;
}

async function waveOf(file) {
  const buffer = await file.arrayBuffer(), rate = rateOf(buffer) ?? model.rate, context = new OfflineAudioContext(1, 1, rate);
  const sound = await context.decodeAudioData(buffer).catch(() => { throw Error("this browser cannot read it as sound"); });
  const parts = Array.from({length: sound.numberOfChannels}, (_, c) => sound.getChannelData(c));
  const mono = parts.length === 1 ? parts[0] : parts[0].map((_, i) => parts.reduce((sum, part) => sum + part[i], 0) / parts.length);
  return rate === model.rate ? mono : resample(mono, rate, model.rate);
}

async function* soundWindows(wave) {
  const frames = wave.length < model.window ? 0 : 1 + Math.floor((wave.length - model.window) / model.shift);
  for (const [first, real] of spans(frames)) {
    const part = new Float32Array(model.samples);
    part.set(wave.subarray(first * model.shift, first * model.shift + model.samples));
    yield {x: (await run("frontend", [tensor(part, [model.samples])])).fill(model.silence, real * bands), real};
  }
}

async function arrayOf(file) {
  const bytes = new DataView(await file.arrayBuffer());
  if (bytes.byteLength < 12 || bytes.getUint32(0) !== 0x934e554d) throw Error("it is not a .npy file");
  const wide = bytes.getUint8(6) > 1;
  const start = (wide ? 12 : 10) + (wide ? bytes.getUint32(8, true) : bytes.getUint16(8, true));
  const head = new TextDecoder().decode(new Uint8Array(bytes.buffer, 0, start).subarray(10));
  const [, kind] = /'descr': '([^']+)'/.exec(head) ?? [], shape = /'shape': \(([^)]*)\)/.exec(head)[1].split(",").filter(n => n.trim()).map(Number);
  const types = {"<f4": Float32Array, "<f8": Float64Array, "<i2": Int16Array, "<i4": Int32Array, "|u1": Uint8Array, "|i1": Int8Array, "<u2": Uint16Array};
  if (!types[kind] || /'fortran_order': True/.test(head)) throw Error(`it holds ${kind} or is in Fortran order; save numpy.ascontiguousarray(x, dtype="float32")`);
  const whole = shape.length === 1 ? [1, ...shape] : shape;
  if (whole.length !== 2 || whole[0] !== model.channels) throw Error(`its shape is (${shape}); expected (${model.channels}, length)`);
  return {values: Float32Array.from(new types[kind](bytes.buffer.slice(start))), frames: whole[1]};
}

async function* arrayWindows({values, frames}) {
  if (!values.every(Number.isFinite)) throw Error("it holds numbers that are not finite");
  for (const [first, real] of spans(frames)) {
    const place = i => Math.floor(i / length) * frames + first + Math.min(i % length, real - 1);  // the last value goes on
    yield {x: Float32Array.from({length: model.channels * length}, (_, i) => values[place(i)]), real};
  }
}

// [first, real] of the windows of so many frames; an end that fills less than half a patch is left out.
function spans(frames) {
  const fewest = Math.ceil(patch / 2), made = [];
  if (frames < fewest) throw Error(`it is too short: ${frames} frames, but half a patch of ${patch} needs ${fewest}`);
  for (let first = 0; frames - first >= fewest; first += length) made.push([first, Math.min(length, frames - first)]);
  return made;
}

// The networks.

const tensor = (data, shape) => new ort.Tensor(data instanceof Uint8Array ? "bool" : "float32", data, [1, ...shape]);

async function run(name, values) {
  const given = Object.fromEntries(model.graphs[name].map((input, i) => [input, values[i]]));
  return Object.values(await sessions[name].run(given))[0].data;
}

async function compute(windows) {
  const made = {codes: [], features: [], positions: [], frames: 0, inputs: []}, start = performance.now();
  for await (const {x, real} of windows) {
    const marks = Uint8Array.from({length: tokens}, (_, t) => 2 * (real - Math.floor(t / columns) * patch) >= patch);
    const given = [tensor(x, [model.channels, ...model.input]), tensor(marks, [tokens])];
    const codes = await run("tokenizer", given), features = await run("encoder", given), width = features.length / tokens;
    for (let t = 0; t < tokens; t++) {
      if (!marks[t]) continue;
      made.codes.push(Array.from(codes.subarray(t * stages, (t + 1) * stages), Number));
      made.features.push(features.slice(t * width, (t + 1) * width));
      made.positions.push([made.inputs.length * length / patch + Math.floor(t / columns), t % columns].slice(0, axes.length));
    }
    if (made.frames < DRAWN) made.inputs.push(x); else made.inputs.push(null);
    made.frames += real;
    say("working", `${made.codes.length} tokens …`);
    await new Promise(resolve => setTimeout(resolve));  // lets the page be drawn
  }
  return {...made, milliseconds: performance.now() - start};
}

async function show(name, read, url) {
  if (!sessions) return;
  say("working", `Reading ${name} …`);
  try {
    const windows = {picture: pictureWindows, sound: soundWindows, array: arrayWindows}[model.kind];
    found = {name, ...await compute(windows(await read()))};
    [chosen, found.scene] = [0, sceneOf(found)];
  } catch (error) {
    return say("error", `${name}: ${error.message}.`);
  }
  at("player").hidden = model.kind !== "sound" || !url;
  if (url) at("player").src = url;
  at("name").textContent = name;
  const bits = model.colors.reduce((sum, book) => sum + Math.log2(book.length), 0);
  at("facts").replaceChildren(...[`${found.codes.length} tokens`, `${stages} code${stages > 1 ? "s" : ""}, ${bits.toFixed(0)} bits each`,
    `${found.features[0].length} features each`, `${found.milliseconds.toFixed(0)} ms`].map(text => Object.assign(document.createElement("span"), {textContent: text})));
  const [head, rows] = [header(), table(LISTED)], more = found.codes.length - LISTED;
  at("codes").textContent = [head, ...rows].join("\n") + (more > 0 ? `\n… ${more} more rows in the download` : "");
  at("result").hidden = false;
  draw();
  say("done", found.frames > DRAWN && model.kind === "sound" ? `The first ${(DRAWN * model.shift / model.rate).toFixed(0)} s are drawn.` : "");
}

const header = () => [...axes, ...(model.kind === "sound" ? ["seconds"] : []), ...model.colors.map((_, m) => `code_${m + 1}`)].join(",");
const seconds = t => (found.positions[t][0] * patch * model.shift / model.rate).toFixed(3);
const table = most => found.codes.slice(0, most).map((codes, t) => [...found.positions[t], ...(model.kind === "sound" ? [seconds(t)] : []), ...codes].join(","));

// Drawing: a scene has a size, a raster in colour and in grey, and a box for every token that is drawn.

function sceneOf({inputs, positions, frames}) {
  const drawn = Math.min(frames, DRAWN), long = model.kind !== "picture", step = model.kind === "array" ? Math.max(8, Math.floor(1600 * patch / drawn)) : 0;
  const width = step ? Math.ceil(drawn / patch) * step : long ? drawn : bands, height = step ? 160 : long ? bands : length;
  const boxes = positions.filter(place => !long || (place[0] + 1) * patch < drawn + patch).map(([i, j]) =>
    step ? [i * step, 0, step, height] : long ? [i * patch, height - (j + 1) * breadth, patch, breadth] : [j * breadth, i * patch, breadth, patch]);
  const sorted = Float32Array.from(inputs.filter(x => x).flatMap(x => [...x])).sort(), quantile = q => sorted[Math.round(q * (sorted.length - 1))];
  const limits = long ? [quantile(0.005), quantile(0.995)] : [0, 1];
  const value = (c, f, k) => {
    const shown = inputs[Math.floor(f / length)][(c * length + f % length) * bands + k];
    return Math.min(1, Math.max(0, (shown - limits[0]) / (limits[1] - limits[0] || 1)));
  };
  const scene = {width, height, boxes, value, drawn, step, zoom: Math.max(1, Math.round(480 / Math.max(height, long ? 200 : width)))};
  if (!step) [scene.color, scene.grey] = [false, true].map(grey => raster(scene, grey, long));
  return scene;
}

const MAGMA = [[0, 0, 4], [28, 16, 68], [79, 18, 123], [129, 37, 129], [181, 54, 122], [229, 80, 100], [251, 135, 97], [254, 194, 135], [252, 253, 191]];

function raster({width, height, value}, grey, long) {
  const image = new ImageData(width, height);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    let color;
    if (long) {
      const level = value(0, x, height - 1 - y) * (MAGMA.length - 1), n = Math.min(MAGMA.length - 2, Math.floor(level));
      color = MAGMA[n].map((low, i) => low + (level - n) * (MAGMA[n + 1][i] - low));
    } else color = [0, 1, 2].map(c => 255 * value(model.channels === 3 ? c : 0, y, x));
    if (grey) color.fill((color[0] + color[1] + color[2]) / 3);
    image.data.set([...color, 255], 4 * (y * width + x));
  }
  const canvas = Object.assign(document.createElement("canvas"), {width, height});
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function paint(canvas, tint) {
  const {width, height, zoom, boxes, step} = found.scene, context = canvas.getContext("2d");
  Object.assign(canvas, {width: width * (step ? 1 : zoom), height: height * (step ? 1 : zoom)});
  canvas.style.imageRendering = step ? "auto" : "";
  context.imageSmoothingEnabled = false;
  if (!step) context.drawImage(tint ? found.scene.grey : found.scene.color, 0, 0, canvas.width, canvas.height);
  context.scale(canvas.width / width, canvas.height / height);
  if (tint) boxes.forEach((box, t) => {
    context.fillStyle = tint(t);
    context.fillRect(...box);
  });
  if (step) lines(context);
  if (!tint) return;
  const stroke = (box, color, wide) => Object.assign(context, {strokeStyle: color, lineWidth: wide * (step ? 1 : 1 / zoom)}).strokeRect(...box);
  if (view < stages) boxes.forEach((box, t) => found.codes[t][view] === found.codes[chosen][view] && stroke(box, "#0009", 2));
  stroke(boxes[chosen], "#000", 6);
  stroke(boxes[chosen], "#fff", 3);
}

function lines(context) {
  const {value, drawn, step, height} = found.scene;
  for (let c = 0; c < Math.min(6, model.channels); c++) {
    Object.assign(context, {strokeStyle: getComputedStyle(document.body).color, lineWidth: 2, globalAlpha: 1 - c / 8});
    context.beginPath();
    for (let f = 0; f < drawn; f++) context.lineTo((f + 0.5) / patch * step, 4 + (1 - value(c, f, 0)) * (height - 8));
    context.stroke();
  }
  context.globalAlpha = 1;
}

// Cosine of every token's features with the chosen token's, the mean over the file taken off.
function similarities() {
  const mean = found.features[0].map((_, d) => found.features.reduce((sum, z) => sum + z[d], 0) / found.features.length);
  const unit = z => { const v = z.map((a, d) => a - mean[d]), norm = Math.hypot(...v) || 1; return v.map(a => a / norm); };
  const own = unit(found.features[chosen]);
  return found.features.map(z => unit(z).reduce((sum, a, d) => sum + a * own[d], 0));
}

function draw() {
  if (!found) return;
  const near = view === stages ? similarities() : null, books = model.colors;
  const tint = t => near ? `rgb(255 150 40 / ${Math.max(0, near[t]) * 0.8})` : `rgb(${books[view][found.codes[t][view]].join(" ")} / 0.55)`;
  at("views").classList.toggle("long", model.kind !== "picture");
  for (const id of ["seen", "map"]) {
    if (model.kind !== "picture") at(id).style.minWidth = `${found.scene.boxes.length / columns * 9}px`;
    paint(at(id), id === "map" ? tint : null);
  }
  at("caption").textContent = near ? "encoder: similarity with the chosen token" : `codes of stage ${view + 1} of ${stages}`;
  for (const button of at("stages").children) button.setAttribute("aria-pressed", button.value === String(view));
  const place = axes.map((name, i) => `${name} ${found.positions[chosen][i]}`).join(", "), counts = new Map();
  if (!near) for (const codes of found.codes) counts.set(codes[view], (counts.get(codes[view]) ?? 0) + 1);
  const own = found.codes[chosen], times = near ? "" : `; code ${own[view]} of stage ${view + 1}: ${counts.get(own[view])} of ${found.codes.length} tokens`;
  at("token").textContent = `Token at ${place}${model.kind === "sound" ? ` (${seconds(chosen)} s)` : ""}: codes ${own.join(", ")}${times}.`;
  at("legend").replaceChildren(...[...counts].sort((a, b) => b[1] - a[1]).slice(0, 12).map(([code, count]) => {
    const chip = Object.assign(document.createElement("button"), {className: "chip", onclick: () => choose(found.codes.findIndex(codes => codes[view] === code))});
    const color = document.createElement("i");
    color.style.background = `rgb(${books[view][code]})`;
    chip.append(color, `${code} × ${count}`);
    return chip;
  }));
}

function choose(token) {
  if (token < 0 || token >= found.scene.boxes.length) return;
  chosen = token;
  draw();
}

function pick(event) {
  const {width, height, boxes} = found.scene, x = event.offsetX / at("map").clientWidth * width, y = event.offsetY / at("map").clientHeight * height;
  choose(boxes.findIndex(([left, top, w, h]) => x >= left && x < left + w && y >= top && y < top + h));
}

function save(name, parts) {
  const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(new Blob(parts)), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveFeatures() {
  const text = `{'descr': '<f4', 'fortran_order': False, 'shape': (${found.features.length}, ${found.features[0].length}), }`;
  const head = text.padEnd(Math.ceil((text.length + 11) / 64) * 64 - 11) + "\n", size = head.length;
  save("features.npy", [new Uint8Array([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, size & 255, size >> 8]), head, ...found.features]);
}

// An example that needs no file: some discs, a rising tone with clicks, or waves.
function example() {
  if (model.kind === "sound") return Float32Array.from({length: 3 * model.rate}, (_, i) => {
    const s = i / model.rate;
    return 0.3 * Math.sin(2 * Math.PI * (200 + 400 * s) * s) + (s % 0.5 < 0.01 ? 0.4 * Math.sin(i * i) : 0);
  });
  if (model.kind === "array") return {frames: length, values: Float32Array.from({length: model.channels * length}, (_, i) => Math.sin(i * (0.02 + 0.06 * (i % length) / length)))};
  const canvas = Object.assign(document.createElement("canvas"), {width: 256, height: 256}), context = canvas.getContext("2d");
  [["#123a5e", 128, 400], ["#e8a33d", 84, 60], ["#c4472f", 170, 44], ["#f4efe6", 128, 26]].forEach(([color, place, radius]) => {
    context.fillStyle = color;
    context.beginPath();
    context.arc(place, 256 - place, radius, 0, 7);
    context.fill();
  });
  return context.getImageData(0, 0, 256, 256);
}

function listen() {
  const input = document.querySelector("#drop input"), read = {picture: pixelsOf, sound: waveOf, array: arrayOf}[model.kind];
  const open = file => file && show(file.name, () => read(file), URL.createObjectURL(file));
  input.onchange = () => open(input.files[0]);
  for (const name of ["dragover", "dragleave", "drop"]) document.addEventListener(name, event => {
    event.preventDefault();
    document.body.classList.toggle("over", name === "dragover");
    if (name === "drop") open(event.dataTransfer.files[0]);
  });
  for (let n = 0; n <= stages; n++) {
    const button = Object.assign(document.createElement("button"), {value: n, textContent: n < stages ? `stage ${n + 1}` : "similarity"});
    button.onclick = () => { view = n; draw(); };
    at("stages").append(button);
  }
  const sides = [...document.querySelectorAll(".scrolled")];
  for (const side of sides) side.onscroll = () => sides.forEach(other => { other.scrollLeft = side.scrollLeft; });
  at("map").onpointerdown = pick;
  at("map").onkeydown = event => {
    const {x, y} = {ArrowLeft: {x: -1, y: 0}, ArrowRight: {x: 1, y: 0}, ArrowUp: {x: 0, y: -1}, ArrowDown: {x: 0, y: 1}}[event.key] ?? {};
    if (x === undefined) return;
    event.preventDefault();
    choose(chosen + (model.kind === "picture" ? y * columns + x : x * columns - (columns > 1 ? y : 0)));
  };
  at("save-codes").onclick = () => save("codes.csv", [[header(), ...table()].join("\n") + "\n"]);
  at("save-features").onclick = saveFeatures;
  at("example").onclick = () => show("example", async () => example());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return [input, at("example")];
}

async function begin() {
  if (location.protocol === "file:") return say("error", "Browsers load no model from a file: address. Run `python -m http.server` in this folder and open http://127.0.0.1:8000.");
  try {
    Object.assign(ort.env.wasm, {numThreads: 1, wasmPaths: new URL("./", location.href).href});
    const opened = {};
    for (const name of Object.keys(model.graphs)) opened[name] = await ort.InferenceSession.create(`${name}.onnx`, {executionProviders: ["wasm"]});
    sessions = opened;
  } catch (error) {
    return say("error", `The model could not be loaded: ${error.message ?? error}`);
  }
  for (const control of listen()) control.disabled = false;
  say("ready", "");
}

begin();
