// The search runs in a Web Worker, which browsers refuse to a page opened from disk (file://). Run it in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><title>search</title>"
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const element = inside.document.createElement("script")
          element.src = new URL(script, location.href).href
          element.onload = () => resolve(inside)
          inside.document.body.append(element)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
