// Start Perfetto's engine, and define send(request) and receive(), the next of its answers, in base64.
() => {
  const channel = new MessageChannel();
  const worker = new Worker("engine_bundle.js");
  worker.postMessage(channel.port1, [channel.port1]);
  const answers = [];
  let wake = () => {};
  channel.port2.onmessage = ({ data }) => {
    answers.push(btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join("")));
    wake();
  };
  window.send = (request) =>
    channel.port2.postMessage(Uint8Array.from(atob(request), (char) => char.charCodeAt(0)));
  window.receive = async () => {
    while (answers.length === 0) await new Promise((resolve) => (wake = resolve));
    return answers.shift();
  };
};
