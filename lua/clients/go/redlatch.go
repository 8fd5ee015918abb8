// Package redlatch implements levels 1 to 6 of the redlatch lock protocol, version 1.
package redlatch

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"example.org/redlatch/lua"
	"github.com/redis/go-redis/v9"
)

// Errors to compare with [errors.Is]. A timeout or a cancellation is the error of the context.
var (
	ErrClosed         = errors.New("redlatch: the client is closed")
	ErrBusy           = errors.New("redlatch: another client holds the lock")
	ErrInvalidLock    = errors.New("redlatch: not a valid kind or name of a lock")
	ErrLost           = errors.New("redlatch: the lease expired or was revoked")
	ErrWrongType      = errors.New("redlatch: the key holds something that is not this lock")
	ErrTooDeep        = errors.New("redlatch: the owner has the maximum number of holds")
	ErrMalformed      = errors.New("redlatch: an argument is malformed")
	ErrWouldDeadlock  = errors.New("redlatch: two readers would wait for each other to write")
	ErrTooManyReaders = errors.New("redlatch: the maximum number of readers hold the lock or wait")
	refusals          = map[int64]error{0: ErrLost, -1: ErrLost, -2: ErrWrongType, -3: ErrWrongType,
		-4: ErrTooDeep, -5: ErrMalformed, -6: ErrWouldDeadlock, -7: ErrTooManyReaders}
	errLate = fmt.Errorf("%w: it was granted too late", ErrLost)
	// Do not repeat, but for those that pass. go-redis 9.23 begins that of a new connection so, and
	// may pass it on: "failed to authenticate: WRONGPASS ...". The name of a lock comes later.
	final  = regexp.MustCompile(`^(failed to .+: )?(ERR|NOAUTH|NOPERM|WRONG)|closed$`)
	passes = regexp.MustCompile(`\b(OOM|NOREPLICAS|MISCONF|READONLY|LOADING|BUSY|MASTERDOWN` +
		`|CLUSTERDOWN|TRYAGAIN|max number of clients)\b`)
	tagged   = regexp.MustCompile(`^[^{]*\{[^}]+\}`)
	reserved = regexp.MustCompile(`(?s)^\{[^}]+\}$|\}.*:(fence|waiters)$|\{\}node$`)
	started  = time.Now()
)

const poll, idle = 100 * time.Millisecond, 5 * time.Second // of a waiter; until a PING
const defaultTTL = 30 * time.Second

// Kind is a kind of lock: a script and a verb.
type Kind string

// The kinds of locks. The others are refused with [ErrInvalidLock].
const (
	Mutex     Kind = "mutex/acquire"
	Reentrant Kind = "reentrant/acquire"
	Read      Kind = "rwlock/read"
	Write     Kind = "rwlock/write"
)

func (k Kind) script() string { return path.Dir(string(k)) }
func (k Kind) verb() string   { return path.Base(string(k)) }

// Lock describes a lock. Holds of one Owner nest: Reentrant requires it, Mutex ignores it.
type Lock struct {
	Kind        Kind          // Mutex, Reentrant, Read or Write
	Name, Owner string        // the owner of nested holds is a random text
	TTL         time.Duration // held so long without a renewal: 3 ms to 9999999999 ms; 0: 30 s
	NoWait      bool          // try once: fail with ErrBusy if another client holds the lock
}

// check names what is wrong before it is sent: the server answers only that a word is malformed.
func (l Lock) check(prefix string) error {
	key, ttl := prefix+l.Name, l.TTL.Milliseconds()
	switch {
	case !slices.Contains([]Kind{Mutex, Reentrant, Read, Write}, l.Kind):
		return fmt.Errorf("%w: the kind %q", ErrInvalidLock, l.Kind)
	case l.Name == "" || len(l.Name) > 512 || len(prefix) > 128:
		return fmt.Errorf("%w: no name, or one above 512 bytes, or a prefix above 128", ErrInvalidLock)
	case reserved.MatchString(key), strings.Contains(key, "}") && !tagged.MatchString(key):
		return fmt.Errorf("%w: %q is reserved, or has a } without a hash tag", ErrInvalidLock, key)
	case ttl < 3 || ttl > 9_999_999_999: // 2 ms of it are the reserve: 1 or 2 ms are never valid
		return fmt.Errorf("%w: the TTL %v is below 3 ms or above 9999999999 ms", ErrMalformed, l.TTL)
	case l.Kind == Reentrant && (l.Owner == "" || l.Owner == "mode"):
		return fmt.Errorf("%w: Reentrant requires an owner, other than \"mode\"", ErrMalformed)
	case l.Kind != Mutex && (len(l.Owner) > 256 || strings.HasPrefix(l.Owner, ":") ||
		strings.Contains(l.Owner, " ")):
		return fmt.Errorf("%w: the owner %q has a space or over 256 bytes, or begins with a colon",
			ErrMalformed, l.Owner)
	}
	return nil
}

// Client acquires locks. All of them share one subscription.
type Client struct {
	db              redis.UniversalClient
	prefix, channel string
	scripts         map[string]*redis.Script
	isSubscribed    atomic.Bool
	closing         context.Context    // ends at Close
	stop            context.CancelFunc // of closing
	waiters         sync.Map           // attempt -> context.CancelFunc, which ends its pause
	ended           sync.Map           // attempt -> *Lease, for a minute: a failover may revive it
	closer          sync.Mutex         // while Close begins, or what it waits for: no Add beside the Wait
	background      sync.WaitGroup     // calls of Acquire, and attempts that are being given up
	offset          atomic.Int64       // microseconds from the local clock to the server's
}

// New subscribes, but not with a [redis.Ring]. It returns when ctx ends, even if go-redis still
// waits for a server.
//
// Use the prefix "lock:": clients with the same prefix share locks. Scripts of nil are those of the
// module.
func New(ctx context.Context, db redis.UniversalClient, scripts fs.FS, prefix string) (*Client, error) {
	if scripts == nil {
		scripts = lua.Scripts
	}
	c := &Client{db: db, prefix: prefix, scripts: map[string]*redis.Script{}}
	var err error
	for _, name := range []string{"mutex", "reentrant", "rwlock", "node", "fenced"} {
		text, fileErr := fs.ReadFile(scripts, name+".lua")
		c.scripts[name] = redis.NewScript(string(text))
		err = errors.Join(err, fileErr)
	}
	_, isPlain := db.(*redis.Client) // else PUBLISH may count the subscribers of one node only
	c.channel = fmt.Sprintf("%swake:%x%s", regexp.MustCompile(`\s`).ReplaceAllString(prefix, "_"), rand.Text()[:16], map[bool]string{false: "~"}[isPlain])
	// Beside ctx: by default, go-redis waits for a reply for 3 s, and then repeats the request.
	now, timeErr := within(ctx, func() *redis.TimeCmd { return db.Time(ctx) })
	if timeErr != nil {
		timeErr = fmt.Errorf("redlatch: no answer to TIME: %w", timeErr)
	} else {
		timeErr = now.Err()
	}
	if err = errors.Join(err, timeErr); err != nil {
		return nil, err
	}
	c.observe(now.Val().UnixMicro())
	c.closing, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	// A ring has no subscription: it would be at one shard, while the scripts of the others publish,
	// find no subscriber, and drop the waiter as dead. And Ring.Subscribe panics if no shard is up.
	if _, ok := db.(*redis.Ring); !ok {
		confirmed, confirm := context.WithTimeout(ctx, time.Second)
		go c.listen(c.closing, confirm)
		<-confirmed.Done()
	}
	return c, nil
}

// listen keeps a subscription. One that is silent for a second after a PING is replaced.
func (c *Client) listen(ctx context.Context, confirm func()) {
	for ctx.Err() == nil {
		news, patience, pause := c.db.Subscribe(ctx, c.channel), time.Second, poll
		unwatch := context.AfterFunc(ctx, func() { news.Close() })
		for {
			event, err := news.ReceiveTimeout(ctx, patience)
			if errors.Is(err, os.ErrDeadlineExceeded) && patience == idle {
				patience = time.Second
				news.Ping(ctx)
				continue
			} else if err != nil {
				if isFinal(err) {
					pause = idle
				}
				break
			}
			patience = idle
			switch event := event.(type) {
			case *redis.Subscription: // messages may have been lost
				c.isSubscribed.Store(true)
				confirm()
				for _, wake := range c.waiters.Range {
					wake.(context.CancelFunc)()
				}
			case *redis.Message:
				// Looked up, not searched for: a busy client has thousands of ended attempts.
				attempts, _, _ := strings.Cut(event.Payload, " ")
				for attempt := range strings.SplitSeq(attempts, ",") {
					if lease, ok := c.ended.Load(attempt); ok {
						go lease.(*Lease).releaseAgain(ctx)
					} else if wake, ok := c.waiters.Load(attempt); ok {
						wake.(context.CancelFunc)()
					}
				}
			}
		}
		c.isSubscribed.Store(false)
		for _, wake := range c.waiters.Range { // no message wakes them now: they poll
			wake.(context.CancelFunc)()
		}
		unwatch()
		news.Close()
		time.Sleep(pause)
	}
}

func isFinal(err error) bool {
	return final.MatchString(err.Error()) && !passes.MatchString(err.Error())
}

// Close ends calls of Acquire with [ErrClosed], and waits until their attempts and those that were
// lost or cancelled before are given up: at most one TTL, if no server answers. Release all leases
// before: the others are renewed until the process ends.
func (c *Client) Close() error {
	c.closer.Lock()
	c.stop() // the subscription too: what ends needs no messages
	c.closer.Unlock()
	c.background.Wait()
	return nil
}

// begin counts what Close waits for, unless the client is closed.
func (c *Client) begin() bool {
	c.closer.Lock()
	defer c.closer.Unlock()
	if c.closing.Err() != nil {
		return false
	}
	c.background.Add(1)
	return true
}

// minToken returns min_token in steps of 5 s, since each slows down the next acquire of each lock.
func (c *Client) minToken() int64 { return (c.offset.Load() + micros()) / 5_000_000 * 5_000_000 }
func micros() int64               { return time.Since(started).Microseconds() }

func (c *Client) observe(now int64) { // by two goroutines at once: it never falls
	next := now - micros()
	for old := c.offset.Load(); old < next && !c.offset.CompareAndSwap(old, next); {
		old = c.offset.Load()
	}
}

// WriteFenced writes a value, unless a later lease has written: then it returns false. The token is
// that of the lease; a key beside the value keeps the largest one. A failure may have written: the
// same call again writes the same.
//
// The keys have no prefix. On a cluster they need the same hash tag, as {report}:text and
// {report}:token.
func (c *Client) WriteFenced(ctx context.Context, valueKey, tokenKey string, token int64, value any) (bool, error) {
	written, err := within(ctx, func() *redis.Cmd {
		return c.scripts["fenced"].Run(ctx, c.db, []string{valueKey, tokenKey}, token, value)
	})
	if err != nil {
		return false, fmt.Errorf("redlatch: no answer to the write of %s: %w", valueKey, err)
	}
	return written.Bool()
}

// Acquire waits until the lock is granted or ctx ends, also while no server answers. If ctx ends,
// the error is that of ctx, with the text of the failure that the last request met, if it failed.
func (c *Client) Acquire(ctx context.Context, lock Lock) (*Lease, error) {
	for {
		lease, err := c.attempt(ctx, lock)
		if err != errLate || lock.NoWait {
			return lease, err
		}
	}
}

// attempt is Acquire until a grant comes too late, as after suspension: a new attempt then follows.
func (c *Client) attempt(ctx context.Context, lock Lock) (_ *Lease, err error) {
	lock.TTL = cmp.Or(lock.TTL, defaultTTL)
	l := &Lease{Lock: lock, c: c, attempt: rand.Text(), ttl: lock.TTL.Milliseconds()}
	key, base := c.prefix+l.Name, c.prefix+l.Name
	if err := lock.check(c.prefix); err != nil {
		return nil, err
	} else if !tagged.MatchString(key) {
		base = "{" + key + "}" // all keys of a lock are in one slot
	}
	l.keys = []string{key, base + ":waiters", base + ":fence"}
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	claim := min(l.TTL, 3*time.Second)
	if !l.NoWait {
		l.claim, l.channel = claim.Milliseconds(), ""
		if c.isSubscribed.Load() {
			l.channel = c.channel
		}
	}
	if l.Kind != Mutex {
		l.owner = l.Owner
	}
	if !c.begin() { // nothing would wake it
		return nil, ErrClosed
	}
	defer c.background.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer context.AfterFunc(c.closing, func() { cancel(ErrClosed) })()
	defer func() {
		cancel(nil) // also the pauses
		c.waiters.Delete(l.attempt)
		sent := l.sent.Load()
		if sent == nil { // ctx had ended before the first request: nothing is to be given up
			return
		}
		// The attempt may be queued or hold the lock. After a busy answer too, if go-redis may have
		// repeated the request, 8 ms later at the soonest: the first copy may still be on its way.
		if err != nil && (err != ErrBusy || time.Since(*sent) >= 8*time.Millisecond) {
			c.background.Go(func() { l.Release() })
		}
	}()
	var failure error // of the last request; nil: it was answered
	for ctx.Err() == nil {
		pause, wake := context.WithCancel(ctx)
		c.waiters.Store(l.attempt, wake) // a notification may come before the answer
		sent, delay := time.Now(), poll
		l.sent.Store(&sent)
		answer, err := l.call(ctx, max(l.TTL/4, poll), l.Kind.verb(), l.place, "", l.ttl, c.minToken(), l.claim, l.channel).Result()
		if token, ok := answer.(int64); ok && token >= 0 && l.IsValid() {
			l.Token = token
			go l.keep()
			return l, nil
		} else if ok { // refused, or granted too late
			return nil, cmp.Or(refusals[token], errLate)
		} else if (l.NoWait || err != nil && isFinal(err)) && context.Cause(ctx) != ErrClosed {
			return nil, cmp.Or(err, ErrBusy)
		} else if busy, ok := answer.([]any); ok { // pttl and the server's clock
			c.observe(busy[1].(int64))
			l.place = cmp.Or(l.place, fmt.Sprint(busy[1])) // the first one
			if l.channel == c.channel && c.isSubscribed.Load() {
				delay = claim / 2
			}
			delay = min(max(time.Duration(busy[0].(int64)), 1)*time.Millisecond, delay)
			failure = nil
		} else if ctx.Err() == nil || failure == nil { // the end of ctx hides no earlier failure
			failure = err
		}
		time.AfterFunc(delay, wake)
		<-pause.Done() // after the delay, at a notification or with ctx
	}
	if context.Cause(ctx) == ErrClosed {
		return nil, ErrClosed
	} else if failure != nil {
		// Not wrapped: a request that was not answered in time has context.DeadlineExceeded in it,
		// and a caller that has cancelled would read that ctx had timed out.
		return nil, fmt.Errorf("%w; last failure: %v", ctx.Err(), failure)
	}
	return nil, ctx.Err()
}

// Lease is a granted lock. It is renewed in the background until it is released or lost.
type Lease struct {
	Lock
	Token  int64 // the fencing token
	c      *Client
	keys   []string
	place  string                    // the time of the first busy answer
	sent   atomic.Pointer[time.Time] // when the last grant or renewal was requested
	ctx    context.Context
	cancel context.CancelCauseFunc

	releasing  sync.Mutex // until its answer: one release at a time
	isReleased bool

	attempt, owner, ttl, claim, channel any // words of requests; nil: left out
}

// call sends a request for one lock: a verb, the words of the lock, then the words of the call.
// It returns when ctx or the limit ends, even if go-redis still waits for a reply.
func (l *Lease) call(ctx context.Context, limit time.Duration, verb string, words ...any) *redis.Cmd {
	words = append([]any{verb, l.attempt, l.owner}, words...)
	words = slices.DeleteFunc(words, func(word any) bool { return word == nil })
	limited, cancel := context.WithTimeout(ctx, min(limit, idle))
	defer cancel()
	reply, err := within(limited, func() *redis.Cmd {
		return l.c.scripts[l.Kind.script()].Run(limited, l.c.db, l.keys, words...)
	})
	if err != nil {
		reply = redis.NewCmd(ctx)
		reply.SetErr(fmt.Errorf("redlatch: lock %s: no answer to %s: %w", l.Name, verb, err))
		if ctx.Err() == nil {
			l.testIdle()
		}
	}
	if answers, ok := reply.Val().([]any); ok { // one; or -5: the call is malformed
		reply.SetVal(answers[0])
	}
	return reply
}

// within runs a request, and returns when ctx ends, even if go-redis still waits for the reply.
func within[T any](ctx context.Context, request func() T) (reply T, err error) {
	done := make(chan T, 1)
	go func() { done <- request() }()
	select {
	case reply = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return reply, err
}

// testIdle sends PING on idle connections, so that silent ones are busy until go-redis closes them.
// It must not wait: a renewal would outlast its lease while go-redis asks each silent node of a
// cluster for the slots, as ForEachMaster does. ReloadState only starts that.
func (l *Lease) testIdle() {
	db, err := l.c.db, error(nil)
	if cluster, ok := db.(*redis.ClusterClient); ok {
		cluster.ReloadState(l.ctx)
		db, err = cluster.MasterForKey(l.ctx, l.keys[0]) // as known since New: no request
	}
	if err == nil {
		for range db.PoolStats().IdleConns {
			go db.Ping(context.Background())
		}
	}
}

// Context ends with the lease. [context.Cause] is [ErrLost] if it was lost. It has the values of
// the context of Acquire, not its end: stop at both.
func (l *Lease) Context() context.Context { return l.ctx }

// IsValid reports whether the lock is still held. It sends nothing: call it before each use.
func (l *Lease) IsValid() bool { return l.ctx.Err() == nil && l.remaining() > 0 }

// remaining also counts suspension: the wall clock shows it where Go's monotonic clock stops.
func (l *Lease) remaining() time.Duration {
	sent, now := *l.sent.Load(), time.Now()
	monotonic, wall := now.Sub(sent), now.Round(0).Sub(sent.Round(0))
	return l.TTL - l.TTL/100 - 2*time.Millisecond - monotonic - (wall - monotonic).Abs()
}

// keep renews after a third of the TTL, then soon while no answer comes, and ends at the deadline.
// It looks each second: a timer stops during suspension, and would show the loss up to a third of
// the TTL after it.
func (l *Lease) keep() {
	if l.ctx.Err() == nil {
		wait := l.remaining() - (l.TTL-l.TTL/100)*2/3 // since the last request that was answered left
		if wait <= 0 {
			l.Renew(l.ctx)
			wait = l.TTL / 30
		}
		time.AfterFunc(max(min(wait, time.Second, l.remaining()), time.Millisecond), l.keep)
	}
}

// Renew starts the TTL again, or fails with [ErrLost]. Other errors leave the lease as it is.
func (l *Lease) Renew(ctx context.Context) error { return l.extend(ctx, "renew", nil) }

// Downgrade turns a write hold into a read hold. Its errors are those of Renew.
func (l *Lease) Downgrade(ctx context.Context) error {
	if l.Kind != Write {
		return ErrWrongType
	}
	return l.extend(ctx, "downgrade", l.c.minToken())
}

func (l *Lease) extend(ctx context.Context, verb string, minToken any) error {
	sent, now, err := time.Now(), int64(0), error(nil)
	if l.ctx.Err() != nil {
		return ErrLost // given up already, or released
	} else if l.IsValid() {
		now, err = l.call(ctx, l.remaining()/4, verb, l.ttl, minToken).Int64()
	}
	if err == nil && now <= 0 && now != -5 || !l.IsValid() { // no answer revives an expired lease
		l.cancel(ErrLost)
		isCounted := l.c.begin() // not while Close waits: a group that grows then panics
		go func() {
			if l.giveUp(ErrLost); isCounted {
				l.c.background.Done()
			}
		}()
		return ErrLost
	} else if now > 0 {
		l.c.observe(now)
		l.sent.Store(&sent)
	}
	return cmp.Or(err, refusals[now])
}

// Release releases the lock, or fails with [ErrLost]. It waits for an answer for one TTL at most.
// Once it has succeeded, it returns nil again and sends nothing; after a failure, it tries again.
func (l *Lease) Release() error { return l.giveUp(context.Canceled) }

// giveUp leaves the queue, releases what was granted and makes the server refuse late requests.
func (l *Lease) giveUp(cause error) (err error) {
	if l.cancel(cause); context.Cause(l.ctx) != cause { // the lease has ended before
		return ErrLost
	}
	l.releasing.Lock()
	defer l.releasing.Unlock()
	if l.isReleased {
		return nil // the server forgets a release after a minute: it would answer that it was lost
	}
	defer func() { l.isReleased = err == nil }()
	ctx, cancel := context.WithTimeout(context.Background(), l.TTL)
	defer cancel()
	if l.place != "" {
		l.c.ended.Store(l.attempt, l)
		defer time.AfterFunc(time.Minute, func() { l.c.ended.Delete(l.attempt) })
	}
	for ; ; time.Sleep(100 * time.Millisecond) {
		released, err := l.call(ctx, max(l.TTL/4, poll), "release", "", l.c.minToken(), 1, l.claim, l.channel).Int64()
		if err == nil || ctx.Err() != nil || isFinal(err) {
			return cmp.Or(err, refusals[max(released, 0)])
		}
	}
}

// releaseAgain is for a message that names this attempt after its end: a failover may have revived
// it. Or a poll was granted the lock, and the message of that grant is read late. If this request
// came before a release under way, that one would be told that the lease was lost: it waits.
func (l *Lease) releaseAgain(ctx context.Context) {
	l.releasing.Lock()
	defer l.releasing.Unlock()
	l.call(ctx, idle, "release", "", l.c.minToken())
}
