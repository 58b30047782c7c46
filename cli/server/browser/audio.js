// Every request sends all audio of its conversation and is limited to 32 MiB: a large file is converted here to what models take, mono at
// 16 kHz, two megabytes a minute.

const CONVERT_ABOVE = 4 << 20, MAX_BYTES = 20 << 20, SAMPLE_RATE = 16000, HEADER_BYTES = 44, MAX_SAMPLE = 0x7fff; // bytes; Hz; bytes of a WAV file's header; of 16 bits

// The file, or a smaller WAV of its audio. Throws an Error with a one-line message for the user.
export async function fitForRequest(file) {
  if (file.size <= CONVERT_ABOVE) return file;
  const decoded = await new OfflineAudioContext(1, 1, SAMPLE_RATE).decodeAudioData(await file.arrayBuffer()).catch(() => null);
  const converted = decoded && new File([wav(decoded)], file.name, { type: "audio/wav" });
  const smaller = converted && converted.size < file.size ? converted : file; // a format that this browser cannot decode: sent as it is
  if (smaller.size > MAX_BYTES) throw new Error(`${file.name} is too long for one request: split it into clips of at most ten minutes`);
  return smaller;
}

function wav(audio) {
  const channels = Array.from({ length: audio.numberOfChannels }, (_, number) => audio.getChannelData(number));
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * audio.length));
  const writeText = (at, text) => [...text].forEach((character, index) => view.setUint8(at + index, character.charCodeAt(0)));
  writeText(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  writeText(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of this chunk
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, SAMPLE_RATE, true);
  view.setUint32(28, 2 * SAMPLE_RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true); // bits per sample
  writeText(36, "data");
  view.setUint32(40, 2 * audio.length, true);
  for (let index = 0; index < audio.length; index += 1) {
    const mean = channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length;
    view.setInt16(HEADER_BYTES + 2 * index, Math.round(Math.max(-1, Math.min(1, mean)) * MAX_SAMPLE), true);
  }
  return view.buffer;
}
