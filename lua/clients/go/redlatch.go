// Package redlatch implements levels 1 to 6 of the redlatch lock protocol, version 1.
package redlatch

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Errors to compare with [errors.Is]. A timeout or a cancellation is the error of the context.
var (
	ErrBusy           = errors.New("redlatch: another client holds the lock")
	ErrInvalidLock    = errors.New("redlatch: not a valid kind or name of a lock")
	ErrLost           = errors.New("redlatch: the lease expired or was revoked")
	ErrWrongType      = errors.New("redlatch: the key holds something that is not this lock")
	ErrTooDeep        = errors.New("redlatch: the owner has the maximum number of holds")
	ErrMalformed      = errors.New("redlatch: the server refused an argument as malformed")
	ErrWouldDeadlock  = errors.New("redlatch: two readers would wait for each other to write")
	ErrTooManyReaders = errors.New("redlatch: the maximum number of readers hold the lock or wait")
	refusals          = map[int64]error{0: ErrLost, -1: ErrLost, -2: ErrWrongType, -3: ErrWrongType,
		-4: ErrTooDeep, -5: ErrMalformed, -6: ErrWouldDeadlock, -7: ErrTooManyReaders}
)

const Mutex, Reentrant = "mutex/acquire", "reentrant/acquire" // kinds of locks, by script
const Read, Write = "rwlock/read_acquire", "rwlock/write_acquire"

// Lock describes a lock. Holds of one Owner nest: Reentrant requires it, Mutex ignores it.
type Lock struct {
	Kind, Name, Owner string
	TTL               time.Duration // how long the lock stays held without a renewal
	NoWait            bool          // fail with ErrBusy if another client holds the lock
}

var (
	started  = time.Now()
	hashTag  = regexp.MustCompile(`^[^{]*\{[^}]+\}`)
	reserved = regexp.MustCompile(`^\{[^}]+\}$|:fence$|:waiters$|\{\}node$`) // with a hash tag
	final    = regexp.MustCompile(`^(ERR|NOAUTH|NOPERM|OOM|WRONG)|closed$`)  // do not repeat
)

// Client acquires locks. All of them share one subscription.
type Client struct {
	db              redis.UniversalClient
	prefix, channel string
	scripts         map[string]*redis.Script
	news            *redis.PubSub
	waiters         sync.Map       // attempt -> context.CancelFunc, which ends its pause
	background      sync.WaitGroup // attempts that are being given up
	offset          atomic.Int64   // microseconds from the local clock to the server's
}

// New reads the scripts from the folder of the protocol and subscribes. Rust's prefix is "lock:".
func New(ctx context.Context, db redis.UniversalClient, lua fs.FS, prefix string) (*Client, error) {
	c := &Client{db: db, prefix: prefix, scripts: map[string]*redis.Script{}}
	files, _ := fs.Glob(lua, "*/*.lua")
	for _, file := range append(files, "mutex/acquire.lua") { // fails in any other folder
		text, err := fs.ReadFile(lua, file)
		if err != nil {
			return nil, err
		}
		c.scripts[strings.TrimSuffix(file, ".lua")] = redis.NewScript(string(text))
	}
	c.channel = fmt.Sprintf("%swake:%x", prefix, rand.Text()[:16])
	if _, ok := db.(*redis.ClusterClient); ok {
		c.channel += "~" // PUBLISH counts only the subscribers of its own node
	}
	c.news = db.Subscribe(ctx, c.channel)
	_, err := c.news.ReceiveTimeout(ctx, 5*time.Second) // the confirmation
	now, timeErr := db.Time(ctx).Result()
	if err = errors.Join(err, timeErr); err != nil {
		return nil, errors.Join(err, c.news.Close())
	}
	c.observe(now.UnixMicro())
	go c.listen()
	return c, nil
}

// Close waits until the attempts that are being given up have ended. Release all leases before.
func (c *Client) Close() error { c.background.Wait(); return c.news.Close() }

func (c *Client) listen() {
	for event := range c.news.ChannelWithSubscriptions() {
		if message, ok := event.(*redis.Message); ok {
			for attempt := range strings.SplitSeq(strings.Split(message.Payload, " ")[0], ",") {
				if wake, ok := c.waiters.Load(attempt); ok {
					wake.(context.CancelFunc)()
				}
			}
		} else { // a new connection has subscribed: messages may have been lost
			c.waiters.Range(func(_, wake any) bool { wake.(context.CancelFunc)(); return true })
		}
	}
}

// run returns when ctx ends, even if go-redis still waits for the reply.
func (c *Client) run(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	done := make(chan *redis.Cmd, 1)
	go func() { done <- c.scripts[script].Run(ctx, c.db, keys, args...) }()
	select {
	case reply := <-done:
		return reply.Result()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// minToken returns min_token in steps of 5 s, since each slows down the next acquire of each lock.
func (c *Client) minToken() int64 {
	return (c.offset.Load() + time.Since(started).Microseconds()) / 5_000_000 * 5_000_000
}

func (c *Client) observe(serverTime int64) {
	c.offset.Store(max(c.offset.Load(), serverTime-time.Since(started).Microseconds()))
}

// Acquire waits until the lock is granted or ctx ends, also while no server answers.
func (c *Client) Acquire(ctx context.Context, lock Lock) (_ *Lease, err error) {
	key, base := c.prefix+lock.Name, c.prefix+lock.Name
	isTagged := hashTag.MatchString(key)
	if c.scripts[lock.Kind] == nil || lock.Name == "" || len(lock.Name) > 512 || len(c.prefix) > 128 ||
		isTagged && reserved.MatchString(key) || !isTagged && strings.Contains(key, "}") {
		return nil, ErrInvalidLock
	} else if !isTagged {
		base = "{" + key + "}"
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // also of all pauses
	l, place := &Lease{Lock: lock, client: c, attempt: rand.Text()}, []any(nil)
	l.keys = []string{key, base + ":fence", base + ":waiters"}
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	claim := min(lock.TTL, 3*time.Second)
	if !lock.NoWait {
		l.queue = []any{claim.Milliseconds(), c.channel}
	}
	if lock.Kind != Mutex {
		l.owner, l.depth = []any{lock.Owner}, []any{""}
	}
	defer func() {
		if c.waiters.Delete(l.attempt); err != nil && err != ErrBusy { // it may be queued or held
			c.background.Go(func() { l.giveUp() })
		}
	}()
	for ctx.Err() == nil {
		pause, wake := context.WithCancel(ctx)
		c.waiters.Store(l.attempt, wake) // also ends the pause if it is called before the answer
		sent, delay := time.Now(), 100*time.Millisecond
		answer, err := c.run(ctx, lock.Kind, l.keys, slices.Concat([]any{l.attempt,
			l.TTL.Milliseconds()}, l.owner, []any{c.minToken()}, l.queue, l.depth, place)...)
		switch answer := answer.(type) {
		case int64:
			l.Token = answer
			l.sent.Store(&sent)
			if answer < 0 || !l.IsValid() {
				return nil, cmp.Or(refusals[answer], ErrLost)
			}
			l.keep()
			return l, nil
		case []any: // busy: pttl and the server's clock
			c.observe(answer[1].(int64))
			place = append(place, answer[1])[:1] // the first one
			delay = min(max(time.Duration(answer[0].(int64)), 1)*time.Millisecond, claim/2)
		}
		if lock.NoWait || err != nil && final.MatchString(err.Error()) {
			return nil, cmp.Or(err, ErrBusy)
		}
		time.AfterFunc(delay, wake)
		<-pause.Done() // after the delay, at a notification or with ctx
	}
	return nil, ctx.Err()
}

// Lease is a granted lock. It is renewed in the background until it is released or lost.
type Lease struct {
	Lock
	Token               int64 // the fencing token
	client              *Client
	keys                []string
	attempt             string
	queue, owner, depth []any                     // arguments: claim_ms and channel; not for a mutex
	sent                atomic.Pointer[time.Time] // when the last grant or renewal was requested
	ctx                 context.Context
	cancel              context.CancelCauseFunc
}

// Context ends with the lease. [context.Cause] is [ErrLost] if it was lost.
func (l *Lease) Context() context.Context { return l.ctx }

// IsValid reports whether the lock is still held. It sends nothing: call it before each use.
func (l *Lease) IsValid() bool { return l.ctx.Err() == nil && l.remaining() > 0 }

// remaining also counts suspension: the wall clock shows it where Go's monotonic clock stops.
func (l *Lease) remaining() time.Duration {
	sent, now := *l.sent.Load(), time.Now()
	monotonic, wall := now.Sub(sent), now.Round(0).Sub(sent.Round(0))
	return l.TTL - l.TTL/100 - 2*time.Millisecond - monotonic - (wall - monotonic).Abs()
}

// keep renews after a third of the TTL, then after a third of the rest while no answer comes.
func (l *Lease) keep() {
	time.AfterFunc(max(l.remaining()/3, 5*time.Millisecond), func() {
		if l.Renew(l.ctx); l.ctx.Err() == nil {
			l.keep()
		}
	})
}

// Renew starts the TTL again, or fails with [ErrLost]. Other errors leave the lease as it is.
func (l *Lease) Renew(ctx context.Context) error { return l.extend(ctx, "renew", l.keys[:1]) }

// Downgrade turns a write hold into a read hold. Its errors are those of Renew.
func (l *Lease) Downgrade(ctx context.Context) error {
	if l.Kind != Write {
		return ErrWrongType
	}
	return l.extend(ctx, "downgrade", l.keys, l.client.minToken())
}

func (l *Lease) extend(ctx context.Context, verb string, keys []string, minToken ...any) error {
	ctx, cancel := context.WithTimeout(ctx, l.remaining())
	defer cancel()
	sent, answer, err := time.Now(), any(int64(0)), error(nil)
	if l.IsValid() {
		answer, err = l.client.run(ctx, path.Dir(l.Kind)+"/"+verb, keys,
			slices.Concat([]any{l.attempt, l.TTL.Milliseconds()}, l.owner, minToken)...)
	}
	switch now, _ := answer.(int64); {
	case now == -5:
		return ErrMalformed
	case err == nil && now <= 0 || !l.IsValid(): // no answer revives an expired lease
		if l.cancel(ErrLost); context.Cause(l.ctx) == ErrLost {
			l.client.background.Go(func() { l.giveUp() })
		}
		return ErrLost
	case err == nil:
		l.client.observe(now)
		l.sent.Store(&sent)
	}
	return err
}

// Release releases the lock, or fails with [ErrLost]. It waits for an answer for one TTL at most.
func (l *Lease) Release() error {
	if l.cancel(nil); context.Cause(l.ctx) == ErrLost {
		return ErrLost
	}
	return l.giveUp()
}

// giveUp leaves the queue, releases what was granted and makes the server refuse late requests.
func (l *Lease) giveUp() error {
	ctx, cancel := context.WithTimeout(context.Background(), l.TTL)
	defer cancel()
	for ; ; time.Sleep(100 * time.Millisecond) {
		answer, err := l.client.run(ctx, path.Dir(l.Kind)+"/release", l.keys, slices.Concat(
			[]any{l.attempt}, l.owner, []any{l.client.minToken(), 1}, l.queue, l.depth)...)
		if released, ok := answer.(int64); ok || ctx.Err() != nil || final.MatchString(err.Error()) {
			return cmp.Or(err, refusals[max(released, 0)])
		}
	}
}
