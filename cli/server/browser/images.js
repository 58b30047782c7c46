// Every question sends all pictures of its conversation, since a server keeps nothing of it: made smaller here where they would be more
// than a request may hold.

const REQUEST_CHARACTERS = 28 << 20, REQUEST_POINTS = 60e6; // of all pictures; the rest of what a server takes is for words
const QUALITY = 0.9, STEP = 0.8, LEAST = 64, EMPTY = 16; // of JPEG; from one try to the next; points on the longer side; characters

// Messages whose pictures (data URLs) go together into a request. Those that are too large for their share are replaced in the messages,
// so that the next question sends the same again, which the server knows. Says whether any was.
export async function fit(messages) {
  const seeing = messages.filter((message) => message.pictures?.length);
  const all = await Promise.all(seeing.flatMap((message) => message.pictures).map(decoded));
  const sum = (of) => all.reduce((total, picture) => total + of(picture), 0);
  if (sum((picture) => picture.url.length) <= REQUEST_CHARACTERS && sum((picture) => picture.points) <= REQUEST_POINTS) return false;
  // As large as if there were two, four, eight of them: the next picture does not change those before it.
  const shares = 2 ** Math.ceil(Math.log2(all.length));
  const urls = all.map((picture) => smaller(picture, REQUEST_CHARACTERS / shares, REQUEST_POINTS / shares));
  for (const message of seeing) message.pictures = urls.splice(0, message.pictures.length);
  return true;
}

async function decoded(url) {
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    return { url, image: null, points: 0 }; // of a kind that this browser does not read: the server says what it makes of it
  }
  return { url, image, points: image.naturalWidth * image.naturalHeight };
}

function smaller({ url, image, points }, characters, mostPoints) {
  if (!image || (url.length <= characters && points <= mostPoints)) return url;
  const longer = Math.max(image.naturalWidth, image.naturalHeight);
  let scale = Math.min(1, Math.sqrt(mostPoints / points)), made;
  do {
    made = drawn(image, scale);
    scale *= STEP;
  } while ((made.length > characters || made.length < EMPTY) && longer * scale >= LEAST); // a canvas may be too large for a browser
  return made;
}

function drawn(image, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.floor(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.floor(image.naturalHeight * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent: JPEG has none of that
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
