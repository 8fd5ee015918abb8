//! What a server keeps of a lock, and how it is put there and read back.

use redis::Cmd;

use super::cast::Cast;

/// A hold: whose, until when, and for which attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    pub live: bool,
    pub owner: usize,
    pub attempts: Vec<usize>,
}

/// All that the scripts know. Ends are only live or over; times and tokens are those of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub write: Option<Hold>,
    pub reads: Vec<Option<Hold>>,
    /// The hold is alone, and ends with the key.
    pub sole: bool,
    pub readers: Option<i64>,
    pub gate: Option<bool>,
    pub upgrade: Option<(bool, usize)>,
    pub phase: Option<i64>,
    pub fence: Option<i64>,
    /// In the order of the queue, with their scores.
    pub queue: Vec<(usize, i64)>,
    pub counter: Option<i64>,
    pub notes: Vec<Option<i64>>,
}

/// What a look at the server shows.
#[derive(Debug)]
pub struct Seen {
    pub kept: Kept,
    /// Those whose hold lasts a ttl, not only a claim.
    pub lasting: Vec<usize>,
}

/// Less than a claim, so that whoever is granted something has to make the key last longer.
const PLACE: &str = r"
local clock = redis.call('TIME')
local live = clock[1] * 1000 + math.floor(clock[2] / 1000) + 50000
redis.call('DEL', unpack(KEYS))
local at = 1
local function some()
  local from = at + 1
  at = from + ARGV[at]
  return from, at - 1
end
local from, to = some()
for i = from + 1, to, 2 do
  local first = string.byte(ARGV[i])
  if first == 76 then ARGV[i] = live .. string.sub(ARGV[i], 2) end
  if first == 79 then ARGV[i] = '1' .. string.sub(ARGV[i], 2) end
end
if from <= to then
  redis.call('HSET', KEYS[1], unpack(ARGV, from, to))
  redis.call('PEXPIREAT', KEYS[1], live)
end
from, to = some()
if from <= to then
  redis.call('ZADD', KEYS[3], unpack(ARGV, from, to))
  redis.call('PEXPIRE', KEYS[3], 60000)
end
from, to = some()
if from <= to then redis.call('SET', KEYS[2], ARGV[from], 'PX', 86400000) end
from, to = some()
for i = from, to, 2 do redis.call('SET', KEYS[tonumber(ARGV[i])], ARGV[i + 1], 'PX', 60000) end
";

/// The first line complains, of what no state may be.
const LOOK: &str = r"
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local seen, latest = {''}, 0
local hash = redis.call('HGETALL', KEYS[1])
for i = 1, #hash, 2 do
  local field, value = hash[i], hash[i + 1]
  local holds = field == 'write' or string.sub(field, 1, 5) == 'read:'
  if holds or field == 'gate' or field == 'upgrade' then
    local ends, words = string.match(value, '^(%d+)(.*)$')
    ends = tonumber(ends)
    local long = ends > now + 100000
    if holds then
      latest = math.max(latest, ends)
    elseif long then
      seen[1] = field .. ' lasts longer than a claim'
    end
    value = (ends <= now and 'over' or long and 'long' or 'live') .. words
  elseif field == 'sole' then
    value = (redis.call('PTTL', KEYS[1]) > 100000 and 'long ' or 'live ') .. value
  end
  seen[#seen + 1] = field .. ' ' .. value
end
local queue = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #queue, 2 do seen[#seen + 1] = 'queued ' .. queue[i] .. ' ' .. queue[i + 1] end
local values = redis.call('MGET', unpack(KEYS, 4))
for i, value in ipairs(values) do
  if value then seen[#seen + 1] = 'note ' .. i .. ' ' .. value end
end
local counter = redis.call('GET', KEYS[2])
if counter then seen[#seen + 1] = 'counter ' .. counter end
for i, key in ipairs(KEYS) do
  if (i < 4 or values[i - 3]) and redis.call('PTTL', key) == -1 then seen[1] = key .. ' has no ttl' end
end
if hash[1] then
  local pttl = redis.call('PTTL', KEYS[1])
  clock = redis.call('TIME')
  now = clock[1] * 1000 + math.floor(clock[2] / 1000)
  if pttl + now + 2 < latest then seen[1] = 'the key ends before a hold' end
end
return table.concat(seen, '\n')
";

/// The names of these two in a server.
#[derive(Clone, Debug)]
pub struct Tools {
    place: String,
    look: String,
}

impl Tools {
    pub async fn load(server: &crate::support::Server) -> Tools {
        let place = server.run(&["SCRIPT", "LOAD", PLACE]).await;
        let look = server.run(&["SCRIPT", "LOAD", LOOK]).await;
        Tools { place, look }
    }

    pub fn look(&self, cast: &Cast) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.look).arg(cast.keys.len()).arg(&cast.keys);
        cmd
    }

    pub fn place(&self, cast: &Cast, kept: &Kept) -> Cmd {
        let end = |live| if live { 'L' } else { 'O' };
        let mut hash: Vec<String> = Vec::new();
        let mut field = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                hash.extend([name.to_owned(), value]);
            }
        };
        let words = |attempts: &[usize]| {
            attempts.iter().map(|one| format!(" {}", cast.attempts[*one].name)).collect::<String>()
        };
        let write = kept.write.as_ref().map(|hold| ("write", hold));
        for (side, hold) in write.into_iter().chain(kept.reads.iter().flatten().map(|hold| ("read", hold))) {
            let (end, owner, words) = (end(hold.live), cast.owners[hold.owner], words(&hold.attempts));
            match side {
                _ if kept.sole => field("sole", Some(format!("{side} {owner}{words}"))),
                "write" => field("write", Some(format!("{end} {owner}{words}"))),
                _ => field(&format!("read:{owner}"), Some(format!("{end}{words}"))),
            }
        }
        if !kept.sole {
            field("fence", kept.fence.map(|token| token.to_string()));
        }
        field("readers", kept.readers.map(|count| count.to_string()));
        field("gate", kept.gate.map(|live| end(live).to_string()));
        field("upgrade", kept.upgrade.map(|(live, owner)| format!("{} {}", end(live), cast.owners[owner])));
        field("phase", kept.phase.map(|time| time.to_string()));

        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.place).arg(cast.keys.len()).arg(&cast.keys);
        cmd.arg(hash.len()).arg(&hash).arg(2 * kept.queue.len());
        for (one, score) in &kept.queue {
            cmd.arg(score).arg(&cast.attempts[*one].waiter);
        }
        cmd.arg(usize::from(kept.counter.is_some())).arg(kept.counter);
        cmd.arg(2 * kept.notes.iter().flatten().count());
        for (at, note) in kept.notes.iter().enumerate() {
            if let Some(note) = note {
                cmd.arg(at + 4).arg(note);
            }
        }
        cmd
    }
}

impl Seen {
    /// Reads what a look answers, or what is wrong with it.
    pub fn read(cast: &Cast, text: &str) -> Result<Seen, String> {
        let mut kept = Kept { reads: vec![None; cast.owners.len()], ..Kept::default() };
        kept.notes = vec![None; cast.attempts.len()];
        let mut lasting = Vec::new();
        let mut lines = text.split('\n');
        match lines.next() {
            Some("") => {}
            complaint => return Err(complaint.unwrap_or_default().to_owned()),
        }
        for line in lines {
            let mut words = line.split(' ');
            let (name, value) = (words.next().unwrap(), words.next().unwrap());
            let number = || value.parse::<f64>().unwrap() as i64;
            let live = value != "over";
            let mut hold = |owner, words: std::str::Split<'_, char>| {
                let attempts: Vec<usize> = words.map(|word| cast.attempt(word)).collect();
                if value == "long" {
                    lasting.extend(&attempts);
                }
                Hold { live, owner, attempts }
            };
            match name {
                "write" => {
                    let owner = cast.owner(words.next().unwrap());
                    kept.write = Some(hold(owner, words));
                }
                "sole" => {
                    let (side, owner) = (words.next().unwrap(), cast.owner(words.next().unwrap()));
                    let hold = Some(hold(owner, words));
                    kept.sole = true;
                    if side == "write" { kept.write = hold } else { kept.reads[owner] = hold }
                }
                "readers" => kept.readers = Some(number()),
                "gate" => kept.gate = Some(live),
                "upgrade" => kept.upgrade = Some((live, cast.owner(words.next().unwrap()))),
                "phase" => kept.phase = Some(number()),
                "fence" => kept.fence = Some(number()),
                "counter" => kept.counter = Some(number()),
                "queued" => {
                    let score = line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
                    kept.queue.push((cast.attempt(value), score as i64));
                }
                "note" => {
                    let at: usize = value.parse().unwrap();
                    // Each request to force is another.
                    if at <= cast.attempts.len() {
                        kept.notes[at - 1] = Some(words.next().unwrap().parse().unwrap());
                    }
                }
                _ => match name.strip_prefix("read:") {
                    Some(owner) => {
                        let owner = cast.owner(owner);
                        kept.reads[owner] = Some(hold(owner, words));
                    }
                    None => return Err(format!("an unknown field: {line}")),
                },
            }
        }
        if kept.sole {
            kept.fence = kept.counter; // it is written down with the end
        }
        Ok(Seen { kept, lasting })
    }
}

impl Kept {
    pub fn writes(&self) -> Option<&Hold> {
        self.write.as_ref().filter(|hold| hold.live)
    }

    pub fn reads(&self, owner: usize) -> Option<&Hold> {
        self.reads[owner].as_ref().filter(|hold| hold.live)
    }

    pub fn queued(&self, attempt: usize) -> Option<i64> {
        self.queue.iter().find(|(one, _)| *one == attempt).map(|(_, score)| *score)
    }

    pub fn is_free(&self) -> bool {
        self.writes().is_none() && (0..self.reads.len()).all(|owner| self.reads(owner).is_none())
    }

    /// The key is not there.
    pub fn is_gone(&self) -> bool {
        let rest =
            Kept { counter: None, notes: Vec::new(), queue: Vec::new(), reads: Vec::new(), ..self.clone() };
        rest == Kept::default() && self.reads.iter().all(Option::is_none)
    }

    /// Without what is over: each script sweeps up some of that.
    pub fn swept(&self) -> Kept {
        Kept {
            write: self.writes().cloned(),
            reads: (0..self.reads.len()).map(|owner| self.reads(owner).cloned()).collect(),
            readers: None,
            sole: false,
            gate: self.gate.filter(|live| *live),
            upgrade: self.upgrade.filter(|(live, _)| *live),
            ..self.clone()
        }
    }

    /// Where a waiter queued to read, as a microsecond.
    pub fn since(score: i64) -> i64 {
        score + (1 << 52)
    }

    /// What became of it, in words.
    pub fn change(&self, other: &Kept, cast: &Cast) -> String {
        let parts = |kept: &Kept| {
            let names = |some: &[usize]| some.iter().map(|one| cast.attempts[*one].name).collect::<Vec<_>>();
            let holds = |hold: &Hold| (cast.owners[hold.owner], names(&hold.attempts));
            let queue: Vec<usize> = kept.queue.iter().map(|(one, _)| *one).collect();
            [
                format!("write {:?}", kept.write.as_ref().map(holds)),
                format!("read {:?}", kept.reads.iter().flatten().map(holds).collect::<Vec<_>>()),
                format!("queue {:?}", names(&queue)),
                format!("gate {:?}", kept.gate),
                format!("upgrade {:?}", kept.upgrade.map(|(_, owner)| cast.owners[owner])),
                format!("phase {:?}, fence {:?}, counter {:?}", kept.phase, kept.fence, kept.counter),
                format!("notes {:?}, scores {:?}", kept.notes, kept.queue),
            ]
        };
        let both = parts(self).into_iter().zip(parts(other)).filter(|(was, is)| was != is);
        both.map(|(was, is)| format!("{was} -> {is}")).collect::<Vec<_>>().join("; ")
    }

    /// What tells this state from others: no times and no tokens, only their order.
    pub fn outline(&self, outline: &mut Vec<u8>) {
        let mut hold = |hold: &Option<Hold>| {
            if let Some(hold) = hold {
                outline.extend([b'L' + u8::from(hold.live), hold.owner as u8]);
                let mut attempts: Vec<u8> = hold.attempts.iter().map(|one| *one as u8).collect();
                attempts.sort_unstable();
                outline.extend(attempts);
            }
            outline.push(255);
        };
        hold(&self.write);
        self.reads.iter().for_each(&mut hold);
        outline.push(u8::from(self.sole));
        outline.push(self.readers.map_or(255, |readers| readers as u8));
        outline.push(self.gate.map_or(255, u8::from));
        outline.push(self.upgrade.map_or(255, |(live, owner)| 2 * owner as u8 + u8::from(live)));
        outline.push(match (self.fence, self.counter) {
            (None, None) => 0,
            (None, Some(_)) => 1,
            (fence, counter) if fence == counter => 2,
            _ => 3,
        });
        for (one, score) in &self.queue {
            let phase = self.phase.is_some_and(|phase| *score < 0 && Kept::since(*score) <= phase);
            outline.extend([*one as u8, u8::from(*score == 0), u8::from(phase)]);
        }
    }
}
