// Every request sends all audio of its conversation, as it does images, and is limited to 32 MiB: a large file is converted here to what
// models take, mono at 16 kHz, which is two megabytes a minute.

const LARGE = 4 << 20, MOST = 20 << 20, RATE = 16000, HEAD = 44, FULL = 0x7fff; // bytes; samples a second; bytes of a WAV file's head

// The file, or a smaller WAV of its audio. Throws an Error with a one-line message for the user.
export async function fitting(file) {
  if (file.size <= LARGE) return file;
  const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer()).catch(() => null);
  const made = decoded && new File([wav(decoded)], file.name, { type: "audio/wav" });
  const smaller = made && made.size < file.size ? made : file; // a format that this browser cannot decode: sent as it is
  if (smaller.size > MOST) throw new Error(`${file.name} is too long for one request: split it into clips of at most ten minutes`);
  return smaller;
}

function wav(sound) {
  const channels = Array.from({ length: sound.numberOfChannels }, (_, number) => sound.getChannelData(number));
  const view = new DataView(new ArrayBuffer(HEAD + 2 * sound.length));
  const word = (at, text) => [...text].forEach((each, place) => view.setUint8(at + place, each.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of this chunk
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true); // bits per sample
  word(36, "data");
  view.setUint32(40, 2 * sound.length, true);
  for (let place = 0; place < sound.length; place += 1) {
    const mean = channels.reduce((sum, channel) => sum + channel[place], 0) / channels.length;
    view.setInt16(HEAD + 2 * place, Math.round(Math.max(-1, Math.min(1, mean)) * FULL), true);
  }
  return view.buffer;
}
